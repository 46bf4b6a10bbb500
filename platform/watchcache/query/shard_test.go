package query

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/sharding"

	"watershed.dev/platform/watchcache/cache"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

func shardOf(t testing.TB, field string, first, last uint64) *Query {
	t.Helper()
	q, err := New(&registryv1.APIResource{StorageResource: "pods"}, &watchfanoutv1.Query{
		Output: &registryv1.Output{MediaType: "application/json"},
		Shard:  &watchfanoutv1.Shard{Field: field, Ranges: []*watchfanoutv1.HashRange{{First: first, Last: last}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// An object is in exactly the shard that upstream's hash of its UID or of its namespace selects.
func TestShards(t *testing.T) {
	const last = 1<<63 - 1
	for n := range 100 {
		uid, namespace := fmt.Sprint("u", n), fmt.Sprint("n", n)
		item := cache.ItemOf(&registryv1.Row{
			Namespace: namespace,
			Json:      fmt.Appendf(nil, `{"metadata":{"labels":{"uid":"x"},"name":"uid","uid":%q}}`, uid),
		})
		for field, value := range map[string]string{uidField: uid, namespaceField: namespace} {
			low := sharding.HashField(value) < "8"
			if got := shardOf(t, field, 0, last).Matches(item); got != low {
				t.Errorf("%s %s is in the low shard: %v", field, value, got)
			}
			if got := shardOf(t, field, last+1, 1<<64-1).MayMatch(item); got == low {
				t.Errorf("%s %s is in the high shard: %v", field, value, got)
			}
		}
	}
}

// BenchmarkShard measures the cost of an event for a watch of a shard.
func BenchmarkShard(b *testing.B) {
	item := cache.ItemOf(&registryv1.Row{
		Namespace: "kube-system",
		Json:      []byte(`{"metadata":{"name":"a","uid":"aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"}}`),
	})
	for _, field := range []string{uidField, namespaceField} {
		b.Run(field, func(b *testing.B) {
			q := shardOf(b, field, 0, 1<<63)
			for b.Loop() {
				q.Matches(item)
			}
		})
	}
}
