package internalwatch

import (
	"context"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
)

// objects reads an etcd. It implements watch.Objects.
type objects struct {
	resources *lookup.Resources
	etcd      *storage.Etcd
}

// Resolve implements watch.Objects. It delegates Tables, and fields that only a converted object has.
func (o *objects) Resolve(ctx context.Context, q *watchfanoutv1.Query) (*query.Query, error) {
	scope, err := o.resources.RequestScope(ctx, q.GetResource())
	if err != nil {
		return nil, err
	}
	if q.GetNamespace() != "" && !scope.APIResource.Namespaced {
		return nil, rpc.ErrDelegate
	}
	resolved, err := query.New(scope.APIResource, q)
	if err == nil && (resolved.Table || resolved.SelectsConvertedFields()) {
		return nil, rpc.ErrDelegate
	}
	return resolved, err
}

// Current implements watch.Objects.
func (o *objects) Current(ctx context.Context) (int64, error) { return o.etcd.ReadRevision(ctx) }

// errCRDChanged is returned if a query's resource changed before the revision of its objects. The caller calls again.
var errCRDChanged = status.Error(codes.Unavailable, "the definition of the resource has just changed")

// Select implements watch.Objects. It reads the selected keys at etcd's current revision.
func (o *objects) Select(ctx context.Context, q *query.Query, start events.Start) ([]*cache.Item, int64, error) {
	// Read the revision first: a later change of the CRD is then in the log after this revision.
	revision, err := o.etcd.ReadRevision(ctx)
	if err != nil {
		return nil, 0, err
	}
	if start.At.Revision > revision {
		return nil, 0, rpc.ErrDelegate // the delegate returns the API's error
	}
	stored, err := o.resources.StorageResource(ctx, q.Entry.StorageResource) // reads a CRD from etcd
	if err != nil {
		return nil, 0, err
	}
	if scope, err := o.resources.RequestScope(ctx, q.Entry.Resource); err != nil {
		return nil, 0, err
	} else if scope.APIResource.Digest != q.Entry.Digest {
		return nil, 0, errCRDChanged
	}
	var items []*cache.Item
	err = o.read(ctx, stored, q, revision, func(kvs []*mvccpb.KeyValue) error {
		for len(kvs) > 0 {
			rows := source.EncodeRows(ctx, stored, kvs)
			kvs = kvs[len(rows):]
			for _, row := range rows {
				if row.Unreadable != "" {
					if q.SkipUnreadable {
						continue
					}
					return watch.UnreadableError(cache.Key(row.Namespace, row.Name), row.Unreadable)
				}
				if q.Encoding.Protobuf && len(row.Protobuf) > 0 && q.Shard == nil {
					row.Json = nil // which the list would hold, and may be six times the bytes in etcd
				}
				if i := cache.ItemOf(row); q.Matches(i) {
					items = append(items, i)
				}
			}
		}
		return nil
	})
	return items, revision, err
}

// read calls each with the keys and values of the query's namespace, or of its only name.
func (o *objects) read(ctx context.Context, stored *storage.Resource, q *query.Query, revision int64,
	each func([]*mvccpb.KeyValue) error) error {
	prefix := stored.Prefix + q.Prefix()
	name, ok := q.ExactName()
	if !ok || name == "" { // no object has an empty name
		return o.etcd.ReadPages(ctx, prefix, revision, true, each)
	}
	resp, err := o.etcd.Client.Client.Get(ctx, prefix+name, clientv3.WithRev(revision))
	if err != nil {
		return err
	}
	return each(resp.Kvs)
}
