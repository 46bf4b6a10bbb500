package eventlog

import (
	"context"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// TraceContextSubject is where a registry tells the publisher of a write that is traced, before it writes.
const TraceContextSubject = "watershed.tracecontext"

// PublishTraceContext tells the publisher of a write that is traced, and waits until it knows or ctx is done. Where it does not
// come to know, nothing but a part of a trace is lost.
func PublishTraceContext(ctx context.Context, nc *nats.Conn, c *logv1.TraceContext) error {
	data, err := proto.Marshal(c)
	if err == nil {
		_, err = nc.RequestWithContext(ctx, TraceContextSubject, data)
	}
	return err
}

// SubscribeTraceContexts calls each with the writes that registries tell of, until the subscription ends.
func SubscribeTraceContexts(nc *nats.Conn, handle func(*logv1.TraceContext)) (*nats.Subscription, error) {
	return nc.Subscribe(TraceContextSubject, func(m *nats.Msg) {
		c := &logv1.TraceContext{}
		if err := proto.Unmarshal(m.Data, c); err == nil {
			handle(c)
			_ = m.Respond(nil)
		}
	})
}
