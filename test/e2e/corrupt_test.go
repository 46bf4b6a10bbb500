package e2e

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// What cannot be decoded is never passed on, and never silently left out: whoever watches the resource is sent back to list
// it, the list says what is wrong, nobody else notices, and all is well once it is gone.
func TestAnObjectThatCannotBeReadIsNotHidden(t *testing.T) {
	etcd := harness.Etcd(t, harness.TempDir(t))
	s := harness.Up(t, "", "--etcd-servers="+etcd)
	etcdctl := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(harness.Peer("etcdctl"), append([]string{"--endpoints", etcd}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("etcdctl: %v\n%s", err, out)
		}
	}
	open := func(resource string) watch.Interface {
		t.Helper()
		var w watch.Interface
		var err error
		if resource == "configmaps" {
			w, err = s.Client().CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: s.Kubectl("get", "namespace", "default", "-o", "jsonpath={.metadata.resourceVersion}")})
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
	for deadline := time.After(20 * time.Second); ; {
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
	for deadline := time.After(20 * time.Second); ; {
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
	harness.Eventually(t, 20*time.Second, func() error {
		if out, err := s.TryKubectl("", "get", "configmap", "-n", "default"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}
