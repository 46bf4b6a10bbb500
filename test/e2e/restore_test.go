package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// TestARestoredEtcdIsAnotherEpoch checks that the epochs before and after a restore do not mix. A restored etcd repeats
// revisions, and writes may pass the log's end before the publisher checks. Open watches end, and lists return etcd's
// data. A request with a revision that etcd has not reached gets an error (F3).
func TestARestoredEtcdIsAnotherEpoch(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	etcd := harness.NewMember(t, dir)
	s := harness.Up(t, "", "--etcd-servers="+etcd.URL)
	create := func(names ...string) (last *corev1.ConfigMap) {
		t.Helper()
		for _, n := range names {
			harness.Eventually(t, harness.Soon, func() (err error) {
				last, err = s.Client().CoreV1().ConfigMaps("default").Create(t.Context(),
					&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: n}}, metav1.CreateOptions{})
				if apierrors.IsAlreadyExists(err) {
					err = nil
				}
				return err
			})
		}
		return last
	}
	create("before")
	backup := filepath.Join(dir, "backup.db")
	if out, err := harness.Etcdctl("--endpoints", etcd.URL, "snapshot", "save",
		backup).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var lost *corev1.ConfigMap
	for i := range 40 {
		lost = create(fmt.Sprint("lost-", i))
	}
	w, err := s.Client().CoreV1().ConfigMaps("default").Watch(context.Background(),
		metav1.ListOptions{ResourceVersion: lost.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	etcd.Stop()
	etcd.Restore(backup)
	etcd.Start()
	for i := range 60 { // past the log's former end
		create(fmt.Sprint("new-", i))
	}
	for until := time.After(harness.Soon); ; {
		select {
		case e, ok := <-w.ResultChan():
			if ok && e.Type != watch.Error {
				if e.Type != watch.Bookmark {
					t.Errorf("a watch of the history before hears of %v", e.Object)
				}
				continue
			}
		case <-until:
			t.Fatal("a watch of the history before goes on")
		}
		break
	}
	harness.Eventually(t, harness.Soon, func() error {
		list, err := s.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		names := map[string]bool{}
		for _, c := range list.Items {
			names[c.Name] = true
		}
		for i := range 60 {
			if !names[fmt.Sprint("new-", i)] {
				return fmt.Errorf("new-%d is missing of %d", i, len(names))
			}
		}
		for i := range 40 {
			if names[fmt.Sprint("lost-", i)] {
				return fmt.Errorf("lost-%d is listed", i)
			}
		}
		if !names["before"] {
			return fmt.Errorf("the objects of the backup are missing")
		}
		return nil
	})
	// A revision that etcd has not reached belongs to another epoch.
	future, err := s.Client().CoreV1().ConfigMaps("default").Watch(context.Background(),
		metav1.ListOptions{ResourceVersion: "1000000000"})
	if err == nil {
		select {
		case e := <-future.ResultChan():
			if st, ok := e.Object.(*metav1.Status); !ok || st.Code != 410 {
				t.Errorf("a watch from the future begins with %v", e)
			}
		case <-time.After(harness.Soon):
			t.Error("a watch from the future waits")
		}
		future.Stop()
	}
	// A new watch delivers new events.
	fresh, err := s.Client().CoreV1().ConfigMaps("default").Watch(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Stop()
	create("after")
	for until := time.After(harness.Soon); ; {
		select {
		case e := <-fresh.ResultChan():
			if c, ok := e.Object.(*corev1.ConfigMap); ok && c.Name == "after" {
				return
			}
		case <-until:
			t.Fatal("a new watch hears of nothing")
		}
	}
}

// TestSnapshots saves a snapshot of a running server, and restores it into the stopped server's directory. The server
// then has the objects of the snapshot, and its event log is whole. With --bump-revision no revision repeats.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		start        func(testing.TB, string, ...string) *harness.Server
		startFlags   []string
		restoreFlags []string
		least        uint64
	}{
		"up":    {harness.Up, nil, []string{"--bump-revision=1000000000"}, 1e9},
		"split": {harness.Split, []string{"--replicas=etcd=3,nats=3"}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			dir := harness.TempDir(t)
			backup := filepath.Join(t.TempDir(), "backup.db")
			snapshot := func(args ...string) (string, error) {
				out, err := exec.Command(harness.Watershed(), append([]string{"snapshot"}, args...)...).CombinedOutput()
				return string(out), err
			}
			s := c.start(t, dir, c.startFlags...)
			s.Kubectl("create", "configmap", "before")
			if out, err := snapshot("save", backup, "--data-dir", dir); err != nil || !strings.Contains(out, "revision") {
				t.Fatalf("%v\n%s", err, out)
			}
			s.Kubectl("create", "configmap", "after")
			restore := append([]string{"restore", backup, "--data-dir", dir}, c.restoreFlags...)
			if out, err := snapshot(restore...); err == nil || !strings.Contains(out, "in use by process") {
				t.Fatalf("a restore below a running server: %v\n%s", err, out)
			}
			s.Stop()
			if out, err := snapshot(restore...); err != nil || !strings.Contains(out, "Restored revision") {
				t.Fatalf("%v\n%s", err, out)
			}
			s = c.start(t, dir, c.startFlags...)
			s.Kubectl("get", "configmap", "before")
			if out, err := s.TryKubectl("", "get", "configmap", "after"); err == nil {
				t.Errorf("an object of after the snapshot exists: %s", out)
			}
			s.Kubectl("create", "configmap", "new")
			m, err := s.Client().CoreV1().ConfigMaps("default").Get(t.Context(), "new", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if revision, _ := strconv.ParseUint(m.ResourceVersion, 10, 64); revision <= c.least {
				t.Errorf("revision %d, want more than %d", revision, c.least)
			}
			checkIsClean(t, "--kubeconfig", s.Kubeconfig)
		})
	}
}

// TestALostMemberOfEtcdIsReplaced loses the data of a member of etcd and of a NATS server, of three each. The next
// start replaces the member. Then another member is lost: the majority that remains contains the replaced member.
func TestALostMemberOfEtcdIsReplaced(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	s := harness.Split(t, dir, "--replicas=etcd=3,nats=3")
	s.Kubectl("create", "configmap", "before")
	for _, lost := range []string{"1", "2"} {
		s.Stop()
		for _, store := range []string{"etcd-", "nats-"} {
			if err := os.RemoveAll(filepath.Join(dir, store+lost)); err != nil {
				t.Fatal(err)
			}
		}
		s = harness.Split(t, dir, "--replicas=etcd=3,nats=3")
		s.Kubectl("get", "configmap", "before")
		checkIsClean(t, "--kubeconfig", s.Kubeconfig)
	}
	backup := filepath.Join(t.TempDir(), "backup.db")
	out, err := exec.Command(harness.Watershed(), "snapshot", "save", backup, "--data-dir", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestAnEmptyEtcdBesideAnEventLog starts a server whose etcd is lost and whose event log is not. The server takes no
// object of the log for an object of etcd: it creates its own objects again at once, and no old binding grants rights.
func TestAnEmptyEtcdBesideAnEventLog(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	began := time.Now()
	s := harness.Up(t, dir)
	first := time.Since(began)
	const own = "flowschemas,prioritylevelconfigurations,clusterroles,clusterrolebindings,namespaces"
	before := s.Kubectl("get", own, "-o", "name")
	s.Kubectl("create", "clusterrolebinding", "lost", "--clusterrole=cluster-admin", "--user=mallory")
	s.Kubectl("auth", "can-i", "delete", "nodes", "--as=mallory")
	s.Stop()
	if err := os.RemoveAll(filepath.Join(dir, "etcd")); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	s = harness.Up(t, dir)
	out, err := s.TryKubectl("", "auth", "can-i", "delete", "nodes", "--as=mallory")
	if !strings.HasSuffix(strings.TrimSpace(out), "no") {
		t.Errorf("a binding of the lost etcd grants: %s, %v", out, err)
	}
	// Upstream's ensurer of FlowSchemas looks again after a minute, if it has taken objects of the log for its own.
	if took := time.Since(began); took > first+50*time.Second {
		t.Errorf("the server was ready after %v, and the first time after %v", took, first)
	}
	if after := s.Kubectl("get", own, "-o", "name"); after != before {
		t.Errorf("the server has the objects\n%s\nwant\n%s", after, before)
	}
}
