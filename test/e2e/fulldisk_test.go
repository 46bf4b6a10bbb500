package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"watershed.dev/test/harness"
)

// mountSmall mounts a file system of some megabytes at a new directory until the test ends. It needs root.
func mountSmall(t *testing.T, dir string, megabytes int) error {
	t.Helper()
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", megabytes))
	}
	if err == nil {
		t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	}
	return err
}

// smallDisk is mountSmall for a test that needs the file system.
func smallDisk(t *testing.T, dir string, megabytes int) {
	t.Helper()
	if err := mountSmall(t, dir, megabytes); err != nil {
		t.Skipf("a file system cannot be mounted: %v", err)
	}
}

// fill fills the file system of dir, and returns a function that frees the space.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	name := filepath.Join(dir, "filler")
	f, err := os.Create(name)
	for block := make([]byte, 1<<20); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	f.Close()
	return func() {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}

// numbered are ConfigMaps that a client creates in order, and the names that a watch has received.
type numbered struct {
	t        *testing.T
	s        *harness.Server
	n        int
	created  []string
	received []string
	events   <-chan watch.Event
}

// watchNumbered watches ConfigMaps. The watch continues at its position after each end, and lists never.
func watchNumbered(t *testing.T, s *harness.Server) *numbered {
	t.Helper()
	maps := s.Client().CoreV1().ConfigMaps("default")
	list, err := maps.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := watchtools.NewRetryWatcherWithContext(t.Context(), list.ResourceVersion, &toolscache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return maps.Watch(ctx, o)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return &numbered{t: t, s: s, events: w.ResultChan()}
}

// create creates the next object with a timeout. Only an acknowledged object is in created.
func (n *numbered) create(timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(n.t.Context(), timeout)
	defer cancel()
	n.n++
	name := fmt.Sprintf("n-%04d", n.n)
	_, err := n.s.Client().CoreV1().ConfigMaps("default").Create(ctx,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err == nil {
		n.created = append(n.created, name)
	}
	return err
}

// receive receives events until the last acknowledged object. The watch has each acknowledged object once, in order.
func (n *numbered) receive() {
	n.t.Helper()
	last := n.created[len(n.created)-1]
	for until := time.After(harness.Soon); !slices.Contains(n.received, last); {
		select {
		case e, ok := <-n.events:
			object, isMap := e.Object.(*corev1.ConfigMap)
			if !ok || !isMap || e.Type != watch.Added {
				n.t.Fatalf("the watch does not continue: %s %+v", e.Type, e.Object)
			}
			if strings.HasPrefix(object.Name, "n-") {
				n.received = append(n.received, object.Name)
			}
		case <-until:
			n.t.Fatalf("the watch has not received %s, but %d objects", last, len(n.received))
		}
	}
	if !slices.IsSorted(n.received) || len(slices.Compact(slices.Clone(n.received))) != len(n.received) {
		n.t.Errorf("events are repeated or out of order: %q", n.received)
	}
	for _, name := range n.created {
		if !slices.Contains(n.received, name) {
			n.t.Errorf("the watch lacks %s", name)
		}
	}
}

// TestFullDisks fills the disks of NATS and of etcd. While NATS' disk is full, writes succeed, and check names the
// reason. Once a disk has space, writes succeed and the watch has every acknowledged write, without a list.
func TestFullDisks(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	nats, etcd := filepath.Join(dir, "nats"), filepath.Join(dir, "etcd")
	smallDisk(t, nats, 64)
	smallDisk(t, etcd, 400)
	s := harness.Split(t, dir)
	n := watchNumbered(t, s)
	create := func() {
		t.Helper()
		harness.Write(t, func() error { return n.create(10 * time.Second) })
	}
	create()
	n.receive()

	free := fill(t, nats)
	for range 20 {
		create()
	}
	checkFinds(t, []string{"--data-dir", dir}, map[string]string{"event-log": "no space left on device"})
	free()
	create()
	n.receive()

	free = fill(t, etcd)
	for until := time.Now().Add(10 * time.Second); n.create(time.Second) == nil; { // until etcd ends
		if time.Now().After(until) {
			t.Log("etcd writes into the space of its file")
			break
		}
	}
	free()
	harness.Eventually(t, harness.Soon, func() error { return n.create(5 * time.Second) })
	n.receive()
	t.Logf("%d of %d writes were acknowledged", len(n.created), n.n)
	checkIsClean(t, "--data-dir", dir, "--deep")
}

// TestEtcdWithoutSpace checks that clients see the deletions of an etcd with the alarm NOSPACE. The publisher cannot
// write its fencing token then, and another publisher gets no lease. Reads stay consistent, and writes continue after
// the alarm.
func TestEtcdWithoutSpace(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	etcd, m := etcdClient(t, etcdOf(t, s)), watchMaps(t, s)
	for _, name := range []string{"early", "late", "last"} {
		m.add(name)
	}

	noSpace(t, etcd, etcdserverpb.AlarmRequest_ACTIVATE)
	if err := m.create("refused"); err == nil || !strings.Contains(err.Error(), "database space exceeded") {
		t.Errorf("a create without space: %v", err)
	}
	m.remove("early")
	harness.Eventually(t, harness.Soon, func() error {
		for _, registry := range []string{"registry-0.log", "registry-1.log"} { // either is the publisher
			log, err := os.ReadFile(filepath.Join(s.Dir, registry))
			if err != nil || strings.Contains(string(log), "etcd has no space for the next fencing token") {
				return err
			}
		}
		return errors.New("no fencing token was due")
	})
	m.remove("late")
	for _, registry := range []string{"registry-0.pid", "registry-1.pid"} {
		kill(t, filepath.Join(s.Dir, registry))
	}
	harness.Eventually(t, harness.Soon, func() error {
		_, err := m.client.Get(t.Context(), "last", metav1.GetOptions{})
		return err
	})
	m.remove("last")

	noSpace(t, etcd, etcdserverpb.AlarmRequest_DEACTIVATE)
	harness.Eventually(t, harness.Soon, func() error { return m.create("after") })
	m.receive(watch.Added, "after")
}

// TestAFullEtcdIsServedAfterARestart checks that a server that starts on an etcd with the alarm NOSPACE becomes ready,
// as kube-apiserver does, and that its watches have deletions.
func TestAFullEtcdIsServedAfterARestart(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	url := harness.Etcd(t, dir)
	etcd := etcdClient(t, clientv3.Config{Endpoints: []string{url}})
	s := harness.Up(t, dir, "--etcd-servers="+url)
	watchMaps(t, s).add("early")
	elected := func() int64 {
		resp, err := etcd.Get(t.Context(), "/registry/watershed/controllers")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Count
	}
	harness.Eventually(t, harness.Soon, func() error {
		if n := elected(); n != 1 {
			return fmt.Errorf("the election has %d keys", n)
		}
		return nil
	})
	noSpace(t, etcd, etcdserverpb.AlarmRequest_ACTIVATE)
	s.Kill()
	harness.Eventually(t, harness.Soon, func() error {
		if elected() > 0 {
			return errors.New("the lease of the killed server has not run out")
		}
		return nil
	})

	s = harness.Up(t, dir, "--etcd-servers="+url)
	if code, body := s.Get("/readyz"); code != http.StatusOK {
		t.Errorf("/readyz: %d %s", code, body)
	}
	m := watchMaps(t, s)
	m.receive(watch.Added, "early")
	m.remove("early")

	noSpace(t, etcd, etcdserverpb.AlarmRequest_DEACTIVATE)
	harness.Eventually(t, harness.Soon, func() error { return m.create("after") })
	m.receive(watch.Added, "after")
}

// watchedMaps are the ConfigMaps of the namespace default, with a watch that must not end.
type watchedMaps struct {
	t      *testing.T
	client typedcorev1.ConfigMapInterface
	events watch.Interface
}

func watchMaps(t *testing.T, s *harness.Server) *watchedMaps {
	t.Helper()
	client := s.Client().CoreV1().ConfigMaps("default")
	events, err := client.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(events.Stop)
	return &watchedMaps{t, client, events}
}

// create creates an object, or finds that an earlier attempt of unknown result has made it.
func (m *watchedMaps) create(name string) error {
	_, err := m.client.Create(m.t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// add creates an object, and receives its event.
func (m *watchedMaps) add(name string) {
	m.t.Helper()
	harness.Write(m.t, func() error { return m.create(name) })
	m.receive(watch.Added, name)
}

// receive receives events until an event of an object.
func (m *watchedMaps) receive(want watch.EventType, name string) {
	m.t.Helper()
	for {
		e := next(m.t, m.events)
		object, isMap := e.Object.(*corev1.ConfigMap)
		if !isMap {
			m.t.Fatalf("the watch has ended: %s %+v", e.Type, e.Object)
		}
		if e.Type == want && object.Name == name {
			return
		}
	}
}

// remove deletes an object. The watch, a GET and a consistent list show it.
func (m *watchedMaps) remove(name string) {
	m.t.Helper()
	harness.Write(m.t, func() error {
		if err := m.client.Delete(m.t.Context(), name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	})
	m.receive(watch.Deleted, name)
	if _, err := m.client.Get(m.t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		m.t.Errorf("%s is deleted, and GET has %v", name, err)
	}
	list, err := m.client.List(m.t.Context(), metav1.ListOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	if slices.ContainsFunc(list.Items, func(c corev1.ConfigMap) bool { return c.Name == name }) {
		m.t.Errorf("%s is deleted, and a consistent list has it", name)
	}
}
