package watch

import (
	"context"
	"encoding/json"

	"k8s.io/apimachinery/pkg/fields"

	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
)

// classify returns the type of an event as the query sees it, and its object. An object that begins to match the
// selector is ADDED. An object that no longer matches is DELETED, with its last matching state.
func (w *watcher) classify(ctx context.Context, e *cache.Event) (string, *cache.Item, error) {
	now, err := w.matches(ctx, e, "fields", e.Item)
	if err != nil {
		return "", nil, err
	}
	before := now
	if e.Previous != nil {
		if before, err = w.matches(ctx, e, "fields before", e.Previous); err != nil {
			return "", nil, err
		}
	}
	kind, left := events.Classify(e.Type, now, before)
	if left {
		return kind, e.Previous, nil
	}
	return kind, e.Item, nil
}

// filterItems returns the items that the query's field selector matches. It requests the converted fields from registry
// in batches.
func (w *watcher) filterItems(ctx context.Context, items []*cache.Item) ([]*cache.Item, error) {
	if !w.query.SelectsConvertedFields() {
		return items, nil
	}
	var out []*cache.Item
	for len(items) > 0 {
		n := conversion.BatchSize(items)
		all, err := w.converter.Fields(ctx, w.query, items[:n])
		if err != nil {
			return nil, err
		}
		for i, item := range items[:n] {
			if w.query.Fields.Matches(fields.Set(all[i])) {
				out = append(out, item)
			}
		}
		items = items[n:]
	}
	return out, nil
}

// matches reports whether the query selects an object of an event. If matching needs a conversion, all watchers share
// its result.
func (w *watcher) matches(ctx context.Context, e *cache.Event, fieldsKey string, i *cache.Item) (bool, error) {
	if !w.query.NeedsConvertedFields(i) {
		return w.query.Matches(i), nil
	}
	if !w.query.MayMatch(i) {
		return false, nil
	}
	key := w.query.EncodingKey.ForFields(fieldsKey)
	data, err := e.Frame(ctx, key, func(ctx context.Context) ([]byte, error) {
		all, err := w.converter.Fields(ctx, w.query, []*cache.Item{i})
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
	return w.query.Fields.Matches(set), nil
}
