package eventlog

import (
	"context"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// TraceContextSubject is the subject on which a registry announces a traced write to the publisher, before the write.
const TraceContextSubject = "watershed.tracecontext"

// PublishTraceContext announces a traced write to the publisher. It waits until the publisher acknowledges or ctx is
// done. An error loses only a part of a trace.
func (l LogID) PublishTraceContext(ctx context.Context, nc *nats.Conn, c *logv1.TraceContext) error {
	data, err := proto.Marshal(c)
	if err == nil {
		_, err = nc.RequestWithContext(ctx, l.Subject(TraceContextSubject), data)
	}
	return err
}

// SubscribeTraceContexts calls handle with the announced writes until the subscription ends.
func (l LogID) SubscribeTraceContexts(nc *nats.Conn, handle func(*logv1.TraceContext)) (*nats.Subscription, error) {
	return nc.Subscribe(l.Subject(TraceContextSubject), func(m *nats.Msg) {
		c := &logv1.TraceContext{}
		if err := proto.Unmarshal(m.Data, c); err == nil {
			handle(c)
			_ = m.Respond(nil)
		}
	})
}
