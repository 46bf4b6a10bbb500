package publisher

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// handle publishes one response of the watch.
func (p *Publisher) handle(ctx context.Context, w *term, resp clientv3.WatchResponse) error {
	if resp.CompactRevision != 0 {
		return rpctypes.ErrCompacted
	}
	if err := resp.Err(); err != nil {
		return err
	}
	if resp.IsProgressNotify() {
		return w.progress(resp.Header.Revision)
	}
	for events := resp.Events; len(events) > 0; {
		n := 1
		for n < len(events) && events[n].Kv.ModRevision == events[0].Kv.ModRevision {
			n++
		}
		if err := p.publishTransaction(ctx, w, events[:n]); err != nil {
			return err
		}
		p.checkpoint.last = etcdEvent{
			key:      string(events[n-1].Kv.Key),
			revision: events[n-1].Kv.ModRevision,
			deleted:  events[n-1].Type == mvccpb.DELETE,
		}
		events = events[n:]
		w.transactionCompleted = true
	}
	p.checkpoint.revision = w.log.Last().Revision
	return nil
}

// transaction is what one revision of etcd says.
type transaction struct {
	revision int64
	// size is how many events etcd has of it, out those that are published and resets what is told beside them.
	size           int
	events, resets []*logv1.Event
}

// reset adds the reset of a resource, for event i. Its place is past all events, by the event that it is for: the same
// whoever publishes the transaction, and from wherever in it.
func (t *transaction) reset(i int, storageResource string, crdChanged bool) {
	index := t.size + 2*i
	if crdChanged {
		index++
	}
	t.resets = append(t.resets, &logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        t.revision,
		StorageResource: storageResource,
		CrdChanged:      crdChanged,
		Index:           int32(index),
	})
}

// reject resets a resource for event i, which cannot be published.
func (t *transaction) reject(i int, storageResource, key string, err error) {
	rejectedEvents.Inc()
	slog.Error("An event cannot be published; its resource is to be read anew",
		"key", key, "revision", t.revision, "error", err)
	t.reset(i, storageResource, false)
}

// publishTransaction publishes the events of one revision: readers apply them together. What is wrong with one of them is the
// matter of its resource, which readers are told to read anew; an error here is one of NATS, of etcd, or of the past.
func (p *Publisher) publishTransaction(ctx context.Context, w *term, events []*clientv3.Event) error {
	t := &transaction{revision: events[0].Kv.ModRevision, size: len(events)}
	for i, e := range events {
		event, crdChanged, err := p.decodeEvent(ctx, e)
		if errors.Is(err, errPrevCompacted) {
			return err
		}
		if crdChanged != "" {
			t.reset(i, crdChanged, true)
		}
		if st, ok := p.resourceByKey(string(e.Kv.Key)); err != nil && ok {
			t.reject(i, st.Name(), string(e.Kv.Key), err)
		}
		if err == nil && event != nil {
			event.Index, event.Traceparent = int32(i), p.traceContexts.pop(e)
			t.events = append(t.events, event)
		}
	}
	return t.append(ctx, w)
}

// append sends what the log does not have yet: it may end amid the transaction.
func (t *transaction) append(ctx context.Context, w *term) error {
	for n, event := range t.events {
		// The resets belong to the same transaction, so that readers apply both at once.
		event.More = n < len(t.events)-1 || len(t.resets) > 0
		var bad *eventlog.UnsendableError
		if err := publishEvent(ctx, w, event); errors.As(err, &bad) {
			t.reject(int(event.Index), event.StorageResource, event.Namespace+"/"+event.Name, bad)
		} else if err != nil {
			return err
		}
	}
	slices.SortFunc(t.resets, func(a, b *logv1.Event) int { return cmp.Compare(a.Index, b.Index) })
	for n, event := range t.resets {
		event.More = n < len(t.resets)-1
		if w.log.Has(event) {
			continue
		}
		if err := w.append(event); err != nil {
			return err
		}
	}
	return nil
}

// publishEvent publishes one event, unless the log has it; its trace is that of the write that it is of, if that is traced. What
// cannot be a message is an *eventlog.UnsendableError, also where the log has what comes after it.
func publishEvent(ctx context.Context, w *term, event *logv1.Event) error {
	if w.log.Has(event) {
		return w.log.Check(w.stamp(event))
	}
	observed := time.Unix(0, event.ObservedUnixNano)
	span, traced := telemetry.StartEventSpan(ctx, event.Traceparent, event.StorageResource, event.Revision, observed)
	defer span.End()
	event.Traceparent = traced
	if err := w.append(event); err != nil {
		return err
	}
	publishedEvents.WithLabelValues(event.StorageResource).Inc()
	return nil
}
