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

// handle publishes one response of the etcd watch.
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

// transaction is the events of one etcd revision.
type transaction struct {
	revision int64
	// size is the number of etcd events. events are published first, then resets.
	size           int
	events, resets []*logv1.Event
}

// reset adds the reset of a resource for event i. Its index follows all events and depends only on i. Every publisher
// therefore gives it the same index, also if it resumes within the transaction.
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

// reject resets the resource of event i, which cannot be published.
func (t *transaction) reject(i int, storageResource, key string, err error) {
	rejectedEvents.Inc()
	slog.Error("An event cannot be published; its resource is reset",
		"key", key, "revision", t.revision, "error", err)
	t.reset(i, storageResource, false)
}

// publishTransaction publishes the events of one revision. Readers apply them together. An event that cannot be
// published resets only its resource. An error is therefore of NATS, of etcd, or errPrevCompacted.
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

// append publishes the events and resets that the log lacks. The log may end within the transaction.
func (t *transaction) append(ctx context.Context, w *term) error {
	for n, event := range t.events {
		// The resets belong to the same transaction, because readers apply it as a whole.
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

// publishEvent publishes an event unless the log has it. The event's span belongs to the trace of its write, if that is
// traced. An event that no message can hold is an *eventlog.UnsendableError, even if the log is past it.
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
