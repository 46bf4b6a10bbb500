package watch

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Objects resolves queries, and reads the objects that they select. A watch calls it only before its first event.
type Objects interface {
	// Resolve resolves a query. The error is query.ErrNotDiscovered, an error of gRPC, or an API error.
	Resolve(context.Context, *watchfanoutv1.Query) (*query.Query, error)
	// Select returns the objects that may match a query, in the order of their keys, and their revision. They are as
	// new as start requires.
	Select(context.Context, *query.Query, events.Start) ([]*cache.Item, int64, error)
	// Current returns the revision after which a watch without a resourceVersion begins.
	Current(context.Context) (int64, error)
}

// Cached reads the objects from the cache, and resolves queries with discovery.
type Cached struct {
	Discovery *discovery.Watcher
	Cache     *cache.Cache
	LogReader *logreader.Reader
}

// Resolve implements Objects.
func (o *Cached) Resolve(_ context.Context, q *watchfanoutv1.Query) (*query.Query, error) {
	return query.Resolve(o.Discovery.View(), q)
}

// Current implements Objects. The cache has reached the revision.
func (o *Cached) Current(ctx context.Context) (int64, error) {
	err := o.LogReader.WaitUntilCurrent(ctx)
	return o.Cache.Progress(), err
}

// Select implements Objects.
func (o *Cached) Select(ctx context.Context, q *query.Query, start events.Start) ([]*cache.Item, int64, error) {
	var err error
	r, began := o.Cache.Resource(q.Entry.StorageResource), time.Now()
	switch {
	case start.At.Revision > 0:
		err = o.LogReader.WaitUntilFresh(ctx, start.At.Revision)
	case !start.AnyRevision:
		err = o.LogReader.WaitUntilCurrent(ctx)
	}
	if err != nil {
		return nil, 0, err
	}
	if !start.AnyRevision {
		r.ObserveReadWait(began)
	}
	snapshot, err := o.LogReader.Snapshot(ctx, r, q.Trigger().Index())
	if err != nil {
		return nil, 0, err
	}
	items, err := selectItems(ctx, snapshot, q)
	return items, snapshot.Revision, err
}

// selectItems returns the objects of a snapshot that may match a query.
func selectItems(ctx context.Context, snapshot *cache.Snapshot, q *query.Query) (items []*cache.Item, err error) {
	if name, ok := q.ExactName(); ok {
		key := cache.Key(q.Namespace, name)
		if i, ok := snapshot.Get(key); ok && q.MayMatch(i) {
			return []*cache.Item{i}, nil
		}
		if reason := snapshot.UnreadableReason(key); reason != "" && !q.SkipUnreadable {
			return nil, UnreadableError(key, reason)
		}
		return nil, nil
	}
	if key, reason, unreadable := snapshot.Unreadable(q.Prefix()); unreadable && !q.SkipUnreadable {
		return nil, UnreadableError(key, reason)
	}
	err = snapshot.Select(ctx, q.Trigger(), q.Prefix(), "", func(i *cache.Item) bool {
		if q.MayMatch(i) {
			items = append(items, i)
		}
		return true
	})
	return items, err
}

// UnreadableError returns kube-apiserver's error for a read that selects an object that cannot be decoded.
func UnreadableError(key, reason string) error {
	return apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s", key, reason))
}
