package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// TestAnObjectThatCannotBeReadIsNotHidden checks that an undecodable object is not delivered, and not silently skipped.
// Watches of its resource end, so that clients list again, and the list returns an error. Other resources are not
// affected, and the resource recovers once the object is deleted.
func TestAnObjectThatCannotBeReadIsNotHidden(t *testing.T) {
	t.Parallel()
	etcd := harness.Etcd(t, harness.TempDir(t))
	s := harness.Up(t, "", "--etcd-servers="+etcd)
	etcdctl := func(args ...string) {
		t.Helper()
		if out, err := harness.Etcdctl(append([]string{"--endpoints", etcd}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("etcdctl: %v\n%s", err, out)
		}
	}
	open := func(resource string) watch.Interface {
		t.Helper()
		var w watch.Interface
		var err error
		if resource == "configmaps" {
			w, err = s.Client().CoreV1().ConfigMaps("default").Watch(t.Context(),
				metav1.ListOptions{ResourceVersion: s.Kubectl("get", "namespace", "default", "-o",
					"jsonpath={.metadata.resourceVersion}")})
		} else {
			w, err = s.Client().CoreV1().Secrets("default").Watch(t.Context(), metav1.ListOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Stop)
		return w
	}
	s.Kubectl("create", "configmap", "fine", "-n", "default")
	maps, secrets := open("configmaps"), open("secrets")
	etcdctl("put", "/registry/configmaps/default/bad", "rubbish")
	var last watch.Event
	for deadline := time.After(harness.Soon); ; {
		var ok bool
		select {
		case last, ok = <-maps.ResultChan():
		case <-deadline:
			t.Fatalf("the watch of config maps goes on; last came %v", last)
		}
		if !ok || last.Type == watch.Error {
			break
		}
	}
	if out, err := s.TryKubectl("", "get", "configmaps", "-n", "default"); err == nil {
		t.Errorf("a list hides it:\n%s", out)
	}
	s.Kubectl("create", "secret", "generic", "after", "-n", "default")
	for deadline := time.After(harness.Soon); ; {
		select {
		case e, ok := <-secrets.ResultChan():
			if !ok {
				t.Fatal("the watch of secrets ended")
			}
			if e.Type != watch.Added {
				continue
			}
		case <-deadline:
			t.Fatal("the watch of secrets has stopped")
		}
		break
	}
	etcdctl("del", "/registry/configmaps/default/bad")
	harness.Eventually(t, harness.Soon, func() error {
		if out, err := s.TryKubectl("", "get", "configmap", "-n", "default"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// TestUnsafeDeletion checks that AllowUnsafeMalformedObjectDeletion deletes an object that cannot be read, as in
// kube-apiserver. The open watch of its resource ends, and the next list and watch are complete. kube-apiserver's cache
// retries its own watch for 30 s first.
func TestUnsafeDeletion(t *testing.T) {
	t.Parallel()
	const gate = "--feature-gates=AllowUnsafeMalformedObjectDeletion=true"
	ours, theirs := harness.Etcd(t, harness.TempDir(t)), harness.TempDir(t)
	reference := harness.KubeAPIServer(t, theirs, harness.Etcd(t, theirs), gate)
	for etcd, s := range map[string]*harness.Server{
		ours:           harness.Up(t, "", "--etcd-servers="+ours, gate),
		reference.Etcd: reference.Server,
	} {
		s.Kubectl("create", "configmap", "fine", "-n", "default")
		maps := s.Client().CoreV1().ConfigMaps("default")
		w, err := maps.Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		if out, err := harness.Etcdctl("--endpoints", etcd, "put", "/registry/configmaps/default/bad",
			"rubbish").CombinedOutput(); err != nil {
			t.Fatalf("etcdctl: %v\n%s", err, out)
		}
		if err := maps.Delete(t.Context(), "bad", metav1.DeleteOptions{}); !apierrors.IsInternalError(err) {
			t.Errorf("%s: a plain delete: %v", s.Dir, err)
		}
		unsafe := metav1.DeleteOptions{IgnoreStoreReadErrorWithClusterBreakingPotential: new(true)}
		if err := maps.Delete(t.Context(), "bad", unsafe); err != nil {
			t.Errorf("%s: %v", s.Dir, err)
		}
		if err := maps.Delete(t.Context(), "fine", unsafe); !apierrors.IsInvalid(err) {
			t.Errorf("%s: the deletion of a readable object: %v", s.Dir, err)
		}
		if s == reference.Server {
			continue
		}
		for timeout, open := time.After(harness.Soon), true; open; {
			select {
			case _, open = <-w.ResultChan():
			case <-timeout:
				t.Fatalf("%s: the watch continues", s.Dir)
			}
		}
		var list *corev1.ConfigMapList
		harness.Eventually(t, harness.Soon, func() (err error) {
			list, err = maps.List(t.Context(), metav1.ListOptions{})
			return err
		})
		if w, err = maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion}); err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		s.Kubectl("create", "configmap", "bad", "-n", "default")
		if e := <-w.ResultChan(); e.Type != watch.Added {
			t.Errorf("%s: %v", s.Dir, e)
		}
	}
}

// TestDecisionsGoOnBesideUnreadableObjects checks that an undecodable object grants nothing and blocks no decision. The
// test covers policy objects and the objects that sort first in their resource.
func TestDecisionsGoOnBesideUnreadableObjects(t *testing.T) {
	t.Parallel()
	etcd := harness.Etcd(t, harness.TempDir(t))
	s := harness.Up(t, "", "--etcd-servers="+etcd)
	for _, key := range []string{"namespaces/0", "clusterroles/0", "clusterrolebindings/0", "roles/default/0",
		"serviceaccounts/default/0", "pods/default/0", "resourcequotas/default/0"} {
		if out, err := harness.Etcdctl("--endpoints", etcd, "put", "/registry/"+key,
			"rubbish").CombinedOutput(); err != nil {
			t.Fatalf("etcdctl: %v\n%s", err, out)
		}
	}
	bind(t, s, "bob")
	bob := impersonator(t, s, "bob")
	var took []time.Duration
	for began := time.Now(); time.Since(began) < 13*time.Second; { // past --policy-freshness-bound
		sent := time.Now()
		harness.Eventually(t, harness.Soon, func() error {
			_, err := bob.CoreV1().ConfigMaps("default").Create(t.Context(),
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}, metav1.CreateOptions{})
			return err
		})
		took = append(took, time.Since(sent))
		time.Sleep(200 * time.Millisecond) // spreads the requests over the whole span
	}
	slices.Sort(took)
	if median := took[len(took)/2]; median > 3*time.Second {
		t.Errorf("the median of %d creations took %v", len(took), median)
	}
	if err := s.Client().RbacV1().ClusterRoleBindings().Delete(t.Context(), "bob", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, func() error {
		if reads(t, bob) {
			return fmt.Errorf("bob still reads")
		}
		return nil
	})
}
