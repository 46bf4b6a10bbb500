package watchfanout

import (
	"context"
	"encoding/json"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
)

// seen is an event as the query sees it: an object that comes into a selector is ADDED, one that leaves it is DELETED
// in the state that it was last seen in.
func (w *watcher) seen(ctx context.Context, e *cache.Event) (string, *cache.Item, error) {
	now, err := w.selects(ctx, e, "fields", e.Item)
	if err != nil {
		return "", nil, err
	}
	before := now
	if e.Previous != nil {
		if before, err = w.selects(ctx, e, "fields before", e.Previous); err != nil {
			return "", nil, err
		}
	}
	switch {
	case e.Type == logv1.Type_TYPE_DELETED:
		if now {
			return "DELETED", e.Item, nil
		}
		return "", nil, nil
	case e.Type == logv1.Type_TYPE_ADDED:
		if now {
			return "ADDED", e.Item, nil
		}
		return "", nil, nil
	case now && before:
		return "MODIFIED", e.Item, nil
	case now:
		return "ADDED", e.Item, nil
	case before:
		return "DELETED", e.Previous, nil
	}
	return "", nil, nil
}

// mayMatch is matches, but where only converting an object can tell.
func (w *watcher) mayMatch(i *cache.Item) bool {
	if !w.converts() || w.own(i) {
		return w.matches(i)
	}
	return w.labels.Empty() || w.labels.Matches(labels.Set(i.Labels))
}

// selected are those of items that may match that do: registry is asked of all that have to be converted, many at a
// time.
func (w *watcher) selected(ctx context.Context, items []*cache.Item) ([]*cache.Item, error) {
	if !w.converts() {
		return items, nil
	}
	var out []*cache.Item
	for len(items) > 0 {
		n := encodable(items)
		all, err := w.convertedFields(ctx, items[:n])
		if err != nil {
			return nil, err
		}
		for i, item := range items[:n] {
			if w.fields.Matches(fields.Set(all[i])) {
				out = append(out, item)
			}
		}
		items = items[n:]
	}
	return out, nil
}

// convertedFields are what items' fields are in the version that the query asks for.
func (w *watcher) convertedFields(ctx context.Context, items []*cache.Item) ([]map[string]string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), encodeTimeout)
	defer cancel()
	r := &registryv1.EncodeRequest{StoredAs: w.entry.StoredAs, Resource: w.entry.Resource, Output: &registryv1.Output{MediaType: frame.JSON}, DefinedAt: w.resource.Redefined()}
	for _, i := range items {
		r.Json, r.Versions = append(r.Json, i.JSON), append(r.Versions, i.Version)
	}
	resp, err := w.registry.Encode(ctx, r)
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	if len(resp.Fields) != len(items) {
		return nil, status.Errorf(codes.Internal, "asked for the fields of %d objects, got %d", len(items), len(resp.Fields))
	}
	out := make([]map[string]string, len(items))
	for i, f := range resp.Fields {
		out[i] = f.Fields
	}
	return out, nil
}

// selects says whether the query selects an object of an event. What only converting can tell is asked once for all
// watchers.
func (w *watcher) selects(ctx context.Context, e *cache.Event, which string, i *cache.Item) (bool, error) {
	if !w.converts() || w.own(i) {
		return w.matches(i), nil
	}
	if !w.mayMatch(i) {
		return false, nil
	}
	data, err := e.Frame(formKey{resource: w.key.resource, version: w.key.version, event: which}, func() ([]byte, error) {
		all, err := w.convertedFields(ctx, []*cache.Item{i})
		if err != nil {
			return nil, err
		}
		return json.Marshal(all[0])
	})
	if err != nil {
		return false, err
	}
	var set fields.Set
	if err := json.Unmarshal(data, &set); err != nil {
		return false, err
	}
	return w.fields.Matches(set), nil
}
