package e2e

import (
	"errors"
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
	"watershed.dev/test/tamper"
)

// setClocks sets the wall clocks of all processes of split, half of them to behind and the others to ahead of the
// machine's.
func setClocks(t *testing.T, s *harness.Server, behind, ahead time.Duration) {
	t.Helper()
	for i, p := range pids(t, s, "*") {
		offset := ahead
		if i%2 == 0 {
			offset = -behind
		}
		setClock(t, p, offset)
	}
}

func setClock(t *testing.T, pid int, ahead time.Duration) {
	t.Helper()
	if err := tamper.SetClock(pid, ahead); errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err) // this processor or kernel lets no test change the clock of a process
	} else if err != nil {
		t.Fatal(err)
	}
}

// TestClocksThatJump checks that watches, consistent reads and revocations go on while wall clocks jump. Certificates
// and tokens stay valid.
func TestClocksThatJump(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	m := watchMaps(t, s)
	bob := impersonator(t, s, "bob")
	for round, clocks := range []struct{ behind, ahead time.Duration }{
		{30 * time.Minute, 0}, {0, 30 * time.Minute}, {20 * time.Minute, 2 * time.Hour}, {0, 0},
	} {
		setClocks(t, s, clocks.behind, clocks.ahead)
		name := fmt.Sprintf("round-%d", round)
		// A clock that is ahead makes policy look old until the next comparison with etcd.
		harness.Eventually(t, harness.Soon, func() error { return m.create(name) })
		m.receive(watch.Added, name)
		bind(t, s, "bob")
		harness.Eventually(t, harness.Soon, func() error {
			if !reads(t, bob) {
				return errors.New("bob may not read yet")
			}
			return nil
		})
		if list, err := m.client.List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) <= round {
			t.Errorf("a consistent list has %d objects, %v", len(list.Items), err)
		}
		bindings := s.Client().RbacV1().ClusterRoleBindings()
		if err := bindings.Delete(t.Context(), "bob", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, harness.Soon, func() error {
			if reads(t, bob) {
				return errors.New("bob still may read")
			}
			return nil
		})
	}
}

// TestStalePolicyExpiresAlthoughAClockGoesBack checks that authz decides nothing by policy that it cannot compare with
// etcd, although its wall clock says that the last comparison was in the future.
func TestStalePolicyExpiresAlthoughAClockGoesBack(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	bob := impersonator(t, s, "bob")
	version := func() error { // without the retries of a 503
		return bob.Discovery().RESTClient().Get().AbsPath("/version").MaxRetries(0).Do(t.Context()).Error()
	}
	harness.Eventually(t, harness.Soon, version)
	for _, p := range pids(t, s, "authz-*") {
		setClock(t, p, -30*time.Minute)
	}
	for _, p := range pids(t, s, "registry-*") {
		freeze(t, p)
	}
	harness.Eventually(t, harness.Soon, func() error {
		if version() == nil {
			return errors.New("bob is still authorized, although authz cannot compare its policy with etcd")
		}
		return nil
	})
}
