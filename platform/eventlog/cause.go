package eventlog

import (
	"context"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// CauseSubject is where a registry tells the publisher of a write that is traced, before it writes.
const CauseSubject = "watershed.cause"

// TellCause tells the publisher of a write that is traced, and waits until it knows or ctx is done. Where it does not
// come to know, nothing but a part of a trace is lost.
func TellCause(ctx context.Context, nc *nats.Conn, c *logv1.TraceContext) error {
	data, err := proto.Marshal(c)
	if err == nil {
		_, err = nc.RequestWithContext(ctx, CauseSubject, data)
	}
	return err
}

// HearCauses calls each with the writes that registries tell of, until the subscription ends.
func HearCauses(nc *nats.Conn, each func(*logv1.TraceContext)) (*nats.Subscription, error) {
	return nc.Subscribe(CauseSubject, func(m *nats.Msg) {
		c := &logv1.TraceContext{}
		if err := proto.Unmarshal(m.Data, c); err == nil {
			each(c)
			_ = m.Respond(nil)
		}
	})
}
