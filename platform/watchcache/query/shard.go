package query

import (
	"slices"

	"watershed.dev/platform/watchcache/cache"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// The fields of shards.
const (
	uidField       = "object.metadata.uid"
	namespaceField = "object.metadata.namespace"
)

// inShard reports whether the query's shard includes an object. The item caches the hash of its UID, because the
// watches of all shards need it.
func (q *Query) inShard(i *cache.Item) bool {
	if q.Shard == nil {
		return true
	}
	var hash uint64
	if q.Shard.Field == namespaceField {
		hash = cache.ShardHash(i.Namespace)
	} else {
		hash = i.UIDHash()
	}
	return slices.ContainsFunc(q.Shard.Ranges, func(r *watchfanoutv1.HashRange) bool {
		return r.First <= hash && hash <= r.Last
	})
}
