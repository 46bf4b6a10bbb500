package e2e

import (
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"

	"watershed.dev/test/harness"
)

// TestCoordinatedLeaderElection checks that both servers give a Lease to the candidate of the oldest emulation version.
// The leaders do not renew the Lease, so an older candidate gets it.
func TestCoordinatedLeaderElection(t *testing.T) {
	t.Parallel()
	theirs, ours := harness.Twins(t, "--feature-gates=CoordinatedLeaderElection=true",
		"--runtime-config=coordination.k8s.io/v1beta1=true")
	for name, s := range map[string]*harness.Server{"kube-apiserver": theirs, "watershed": ours} {
		client := s.Client()
		stands := func(candidate, emulation string) {
			c, _, err := leaderelection.NewCandidate(client, metav1.NamespaceDefault, candidate, "task",
				"1.36.0", emulation, coordinationv1.OldestEmulationVersion)
			if err != nil {
				t.Fatal(err)
			}
			go c.Run(t.Context())
		}
		leads := func(namespace, lease string, holds func(holder string) bool) {
			t.Helper()
			harness.Eventually(t, harness.Soon, func() error {
				l, err := client.CoordinationV1().Leases(namespace).Get(t.Context(), lease, metav1.GetOptions{})
				if err == nil && (l.Spec.HolderIdentity == nil || !holds(*l.Spec.HolderIdentity)) {
					err = fmt.Errorf("%s: the Lease %s is %v", name, lease, l.Spec)
				}
				return err
			})
		}
		is := func(candidate string) func(string) bool {
			return func(holder string) bool { return holder == candidate }
		}
		leads(metav1.NamespaceSystem, "leader-election-controller", func(holder string) bool { return holder != "" })
		stands("newer", "1.36.0")
		stands("older", "1.35.0")
		leads(metav1.NamespaceDefault, "task", is("older"))
		stands("oldest", "1.34.0")
		leads(metav1.NamespaceDefault, "task", is("oldest"))
	}
}
