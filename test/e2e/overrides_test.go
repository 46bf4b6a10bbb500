package e2e

import (
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// overridden is a cluster whose events and leases are in etcds of their own.
type overridden struct {
	t *testing.T
	// ours is Watershed. other is kube-apiserver on the same etcds, or Watershed again.
	ours, other    *harness.Server
	events, leases *harness.Member
	made           int
}

func (o *overridden) event(c *kubernetes.Clientset) *corev1.Event {
	o.t.Helper()
	o.made++
	e, err := c.CoreV1().Events("default").Create(o.t.Context(), &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("e%d", o.made)},
		InvolvedObject: corev1.ObjectReference{Namespace: "default", Name: "x", Kind: "Pod"},
		Reason:         "Test",
	}, metav1.CreateOptions{})
	if err != nil {
		o.t.Fatal(err)
	}
	return e
}

// names lists events with options, in pages if limit is set.
func (o *overridden) names(c *kubernetes.Clientset, opts metav1.ListOptions) (names []string, revision string) {
	o.t.Helper()
	for {
		l, err := c.CoreV1().Events("default").List(o.t.Context(), opts)
		if err != nil {
			o.t.Fatalf("%+v: %v", opts, err)
		}
		for _, e := range l.Items {
			names = append(names, e.Name+"@"+e.ResourceVersion)
		}
		if opts.Continue = l.Continue; l.Continue == "" {
			return names, l.ResourceVersion
		}
	}
}

// keys returns the keys of an etcd below a prefix.
func (o *overridden) keys(m *harness.Member, prefix string) string {
	o.t.Helper()
	out, err := harness.Etcdctl("--endpoints", m.URL, "get", "--prefix", "--keys-only",
		prefix).CombinedOutput()
	if err != nil {
		o.t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// next returns the next event of a watch that is not a bookmark, or the next bookmark.
func (o *overridden) next(w watch.Interface, bookmark bool) string {
	o.t.Helper()
	timeout := time.After(harness.Soon)
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				o.t.Fatal("the watch has ended")
			}
			if (e.Type == watch.Bookmark) == bookmark {
				m, err := meta.Accessor(e.Object)
				if err != nil {
					o.t.Fatalf("%s %+v", e.Type, e.Object)
				}
				return fmt.Sprint(e.Type, " ", m.GetName())
			}
		case <-timeout:
			o.t.Fatal("the watch has no next event")
		}
	}
}

func (o *overridden) watch(revision string) watch.Interface {
	o.t.Helper()
	w, err := o.ours.Client().CoreV1().Events("default").Watch(o.t.Context(), metav1.ListOptions{
		ResourceVersion:     revision,
		AllowWatchBookmarks: true,
	})
	if err != nil {
		o.t.Fatal(err)
	}
	return w
}

// reads compares lists and watches of both servers.
func (o *overridden) reads() {
	o.t.Helper()
	ours, other := o.ours.Client(), o.other.Client()
	_, before := o.names(ours, metav1.ListOptions{})
	w := o.watch(before)
	defer w.Stop()
	for i := range 5 {
		e := o.event([]*kubernetes.Clientset{ours, other}[i%2])
		if got := o.next(w, false); got != "ADDED "+e.Name {
			o.t.Errorf("the watch has %s, not %s", got, e.Name)
		}
	}
	want, revision := o.names(other, metav1.ListOptions{})
	for _, opts := range []metav1.ListOptions{
		{},
		{Limit: 2},
		{ResourceVersion: revision},
		{ResourceVersion: revision, ResourceVersionMatch: metav1.ResourceVersionMatchExact},
		{ResourceVersion: "0"},
	} {
		compare := func() error {
			if got, at := o.names(ours, opts); !slices.Equal(got, want) || at != revision {
				return fmt.Errorf("%+v: %v at %s, not %v at %s", opts, got, at, want, revision)
			}
			return nil
		}
		if opts.ResourceVersion == "0" { // a replica may be behind
			harness.Eventually(o.t, harness.Soon, compare)
		} else if err := compare(); err != nil {
			o.t.Error(err)
		}
	}
	name, _, _ := strings.Cut(want[0], "@")
	if err := other.CoreV1().Events("default").Delete(o.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		o.t.Fatal(err)
	}
	if got := o.next(w, false); got != "DELETED "+name {
		o.t.Errorf("the watch has %s", got)
	}
	got, revision := o.names(ours, metav1.ListOptions{})
	if !slices.Equal(got, want[1:]) {
		o.t.Errorf("after the deletion: %v", got)
	}
	quiet := o.watch(revision) // a watch has its first bookmark after a second, and its second after a minute
	defer quiet.Stop()
	o.next(quiet, true)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("l", o.made)}}
	_, err := ours.CoordinationV1().Leases("default").Create(o.t.Context(), lease, metav1.CreateOptions{})
	if err != nil {
		o.t.Fatal(err)
	}
	if l, err := other.CoordinationV1().Leases("default").List(o.t.Context(), metav1.ListOptions{}); err != nil ||
		!slices.ContainsFunc(l.Items, func(l coordinationv1.Lease) bool { return l.Name == lease.Name }) {
		o.t.Errorf("%v, %v", l, err)
	}
}

// stopped checks that only the resources of a stopped etcd fail.
func (o *overridden) stopped() {
	o.t.Helper()
	ctx, ours := o.t.Context(), o.ours.Client()
	w, err := ours.CoordinationV1().Leases("default").Watch(ctx, metav1.ListOptions{})
	if err != nil {
		o.t.Fatal(err)
	}
	defer w.Stop()
	o.events.Stop()
	o.made++
	name := fmt.Sprint("n", o.made)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := ours.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
		o.t.Error(err)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := ours.CoordinationV1().Leases("default").Create(ctx, lease, metav1.CreateOptions{}); err != nil {
		o.t.Error(err)
	}
	for got := ""; got != "ADDED "+name; { // the watch begins with the leases that exist
		got = o.next(w, false)
	}
	if l, err := ours.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{}); err != nil ||
		!slices.ContainsFunc(l.Items, func(c corev1.ConfigMap) bool { return c.Name == name }) {
		o.t.Errorf("%v", err)
	}
	harness.Eventually(o.t, harness.Soon, func() error {
		if code, body := o.ours.Get("/readyz/etcd-override-0"); code == http.StatusOK {
			return fmt.Errorf("the stopped etcd is healthy: %s", body)
		}
		return nil
	})
	for _, path := range []string{"/readyz/etcd", "/readyz/etcd-override-1", "/readyz/etcd-override-readiness-1"} {
		harness.Eventually(o.t, harness.Soon, func() error { // a check has 2 s
			if code, body := o.ours.Get(path); code != http.StatusOK {
				return fmt.Errorf("%s: %d %s", path, code, body)
			}
			return nil
		})
	}
	o.events.Start()
	harness.Eventually(o.t, harness.Soon, func() error {
		_, err := ours.CoreV1().Events("default").List(ctx, metav1.ListOptions{})
		return err
	})
}

// TestEtcdServersOverrides checks that resources with an etcd of their own have kube-apiserver's keys, revisions, lists
// and watches. A watch resumes across a restart. A stopped etcd affects only its own resources.
func TestEtcdServersOverrides(t *testing.T) {
	t.Parallel()
	for form, run := range map[string]func(*testing.T, *overridden, string) (restart func()){
		"up": func(t *testing.T, o *overridden, flag string) func() {
			dir := harness.TempDir(t)
			theirs := harness.KubeAPIServer(t, dir, harness.Etcd(t, dir), flag)
			o.ours, o.other = theirs.Beside("", flag), theirs.Server
			return func() {
				o.ours.Stop()
				o.ours = theirs.Beside(o.ours.Dir, flag)
			}
		},
		"split": func(t *testing.T, o *overridden, flag string) func() {
			o.ours = harness.Split(t, "", flag)
			o.other = o.ours
			return func() {
				o.ours.Stop()
				o.ours = harness.Split(t, o.ours.Dir, flag)
				o.other = o.ours
			}
		},
	} {
		t.Run(form, func(t *testing.T) {
			o := &overridden{
				t:      t,
				events: harness.NewMember(t, harness.TempDir(t)),
				leases: harness.NewMember(t, harness.TempDir(t)),
			}
			restart := run(t, o, "--etcd-servers-overrides=/events#"+o.events.URL+
				",coordination.k8s.io/leases#"+o.leases.URL)
			o.reads()
			if got := o.keys(o.events, "/registry/"); !strings.Contains(got, "/registry/events/default/e2\n") ||
				strings.Contains(got, "/registry/leases/") {
				t.Errorf("the etcd of events has %s", got)
			}
			if got := o.keys(o.leases, "/registry/"); !strings.Contains(got, "/registry/leases/default/") ||
				strings.Contains(got, "/registry/events/") {
				t.Errorf("the etcd of leases has %s", got)
			}
			_, revision := o.names(o.ours.Client(), metav1.ListOptions{})
			added := o.event(o.ours.Client())
			restart()
			w := o.watch(revision)
			defer w.Stop()
			if got := o.next(w, false); got != "ADDED "+added.Name {
				t.Errorf("a watch after the restart has %s", got)
			}
			o.reads()
			o.stopped()
			o.reads()
		})
	}
	for flag, want := range map[string]string{
		"/events":                           "must be of format: group/resource#servers",
		"example.com/things#http://127.1:1": `--etcd-servers-overrides "example.com/things": no served resource`,
		"/pods#http://127.1:1":              `--etcd-servers-overrides "/pods": the main etcd must have pods`,
	} {
		refused(t, exec.Command(harness.Watershed(), "up", "--data-dir", harness.TempDir(t), "--secure-port",
			fmt.Sprint(porttest.FreePort(t)), "--etcd-servers-overrides="+flag), want)
	}
}
