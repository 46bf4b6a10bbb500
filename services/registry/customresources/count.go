package customresources

import (
	"context"
	"time"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"watershed.dev/services/registry/storage"
)

// countJitter is the jitter of upstream's polls (k8s.io/apiserver/pkg/registry/generic/registry/store.go).
const countJitter = 1.2

// CountObjects records the number of objects of each CRD every period, until ctx is done. Upstream's stores do so for
// built-in resources. A store of a CRD's version has no end, so it cannot.
func (t *Set) CountObjects(ctx context.Context, period time.Duration) error {
	counted := map[schema.GroupResource]bool{}
	wait.JitterUntilWithContext(ctx, func(ctx context.Context) {
		current := map[schema.GroupResource]bool{}
		for _, r := range t.storageResources() {
			n, err := r.Etcd.Client.Kubernetes.Count(ctx, r.Prefix, etcdkubernetes.CountOptions{})
			metrics.UpdateStoreStats(r.GroupResource, apistorage.Stats{ObjectCount: n}, err)
			current[r.GroupResource] = true
		}
		for gr := range counted {
			if !current[gr] {
				metrics.DeleteStoreStats(gr)
			}
		}
		counted = current
	}, period, countJitter, true)
	return ctx.Err()
}

func (t *Set) storageResources() (all []*storage.Resource) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, d := range t.byName {
		all = append(all, d.storageResource)
	}
	return all
}
