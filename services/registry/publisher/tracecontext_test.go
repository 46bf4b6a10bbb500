package publisher

import (
	"fmt"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

func over(key string, revision int64) *mvccpb.Event {
	e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(key)}}
	if revision > 0 {
		e.PrevKv = &mvccpb.KeyValue{Key: []byte(key), ModRevision: revision}
	}
	return e
}

// An event belongs to the trace of the write that replaced the same revision of the same key, once and until the TTL.
func TestTraceContexts(t *testing.T) {
	var c traceContexts
	c.add(&logv1.TraceContext{Key: "a", ExpectedRevision: 5, Traceparent: "update"})
	c.add(&logv1.TraceContext{Key: "a", Traceparent: "create"})
	c.add(&logv1.TraceContext{Key: "old", Traceparent: "failed"})
	c.byWrite[writeKey{"old", 0}] = traceContext{"failed", time.Now().Add(-2 * traceContextTTL)}
	for _, w := range []struct {
		event *mvccpb.Event
		want  string
	}{
		{over("a", 4), ""},
		{over("b", 5), ""},
		{over("a", 5), "update"},
		{over("a", 5), ""},
		{over("old", 0), ""},
		{over("a", 0), "create"},
	} {
		if got := c.pop(w.event); got != w.want {
			t.Errorf("%s over %v is of trace %q, not %q", w.event.Kv.Key, w.event.PrevKv, got, w.want)
		}
	}
	if c.count.Load() != 0 {
		t.Errorf("%d trace contexts remain", c.count.Load())
	}
	for i := range 3 * maxTraceContexts {
		c.add(&logv1.TraceContext{Key: fmt.Sprint(i)})
	}
	if len(c.byWrite) != maxTraceContexts {
		t.Errorf("%d trace contexts are cached", len(c.byWrite))
	}
}
