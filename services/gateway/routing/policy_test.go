package routing

import (
	"testing"

	"google.golang.org/grpc"

	"watershed.dev/platform/identity"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/watch"
)

// The services that decide are answered by registry: lists, watches and GETs.
func TestWhoDecidesIsAnsweredByRegistry(t *testing.T) {
	var nowhere grpc.ClientConnInterface
	r := &Router{Tier: watchfanoutv1.NewWatchClient(nowhere), Watches: &watch.Hub{}, Policy: watchfanoutv1.NewPolicyClient(nowhere), PolicyWatches: &watch.Hub{}, TierGets: true}
	e := entryOf()
	e.Verbs = []string{"get", "list", "watch"}
	for group, decides := range map[string]bool{identity.ServicesGroup: true, "system:masters": false, "system:nodes": false} {
		c := &call{Router: r, entry: e, user: &commonv1.User{Name: "u", Groups: []string{"a", group}}, out: &registryv1.Output{MediaType: "application/json"}}
		source, hub := c.source()
		if lists := source == lister(r.Policy); lists != decides || (hub == r.PolicyWatches) != decides {
			t.Errorf("%s: lists of registry's %v, watches %v", group, lists, hub == r.PolicyWatches)
		}
		if decides {
			if _, ok := c.getFromTier(); ok {
				t.Errorf("%s: a GET is answered by a replica", group)
			}
		}
	}
}
