package apiclient

import (
	"context"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/rpc"
)

// catchUp lists an informer's objects if the informer has not reached a revision. It injects the differences into the
// informer's open watch. The watch then ends, and the informer continues from the revision of the list.
func (c *Cluster) catchUp(ctx context.Context, f trackedInformer, revision int64) error {
	mu, _ := c.catchUps.LoadOrStore(f.informer, &sync.Mutex{})
	mu.(*sync.Mutex).Lock()
	defer mu.(*sync.Mutex).Unlock()
	if !f.isBehind(revision) { // another service has caught up the informer meanwhile
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout())
	defer cancel()
	at, err := c.streams.positions(f.path, f.query) // before the list, which so has all events up to the positions
	if err != nil {
		return err
	}
	url := f.path
	if f.query != "" {
		url += "?" + f.query
	}
	data, err := rpc.HedgedOnce(ctx, listHedgeDelay, func(ctx context.Context) ([]byte, error) {
		return c.Client.CoreV1().RESTClient().Get().RequestURI(url).SetHeader("Accept",
			runtime.ContentTypeProtobuf).Do(ctx).Raw()
	})
	if err != nil {
		return err
	}
	obj, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), data)
	if err != nil {
		return err
	}
	list, err := meta.ListAccessor(obj)
	if err != nil {
		return err
	}
	items, err := meta.ExtractList(obj)
	if err != nil {
		return err
	}
	listed, err := strconv.ParseInt(list.GetResourceVersion(), 10, 64)
	if err != nil {
		return err
	}
	if !f.isBehind(listed) {
		return nil // its watch has sent these events, or newer events
	}
	events, err := diff(items, f.informer.GetStore())
	if err != nil {
		return err
	}
	frames, err := encodeEvents(events, obj, list.GetResourceVersion())
	if err != nil {
		return err
	}
	c.streams.inject(at, frames)
	return nil
}

// diff returns the events that change a store's content to the listed items.
func diff(items []runtime.Object, store cache.Store) ([]watch.Event, error) {
	var events []watch.Event
	listed := make(map[string]bool, len(items))
	for _, item := range items {
		m, err := meta.Accessor(item)
		if err != nil {
			return nil, err
		}
		key := cache.MetaObjectToName(m).String()
		listed[key] = true
		old, known, err := store.GetByKey(key)
		if err != nil {
			return nil, err
		}
		if !known {
			events = append(events, watch.Event{Type: watch.Added, Object: item})
			continue
		}
		if o, err := meta.Accessor(old); err != nil || o.GetResourceVersion() != m.GetResourceVersion() {
			events = append(events, watch.Event{Type: watch.Modified, Object: item})
		}
	}
	for _, key := range store.ListKeys() {
		if old, known, err := store.GetByKey(key); err == nil && known && !listed[key] {
			if obj, ok := old.(runtime.Object); ok {
				events = append(events, watch.Event{Type: watch.Deleted, Object: obj})
			}
		}
	}
	return events, nil
}
