package eventlog

import (
	"log/slog"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// CauseSubject is where a registry tells the publisher of a write that is traced, before it writes.
const CauseSubject = "watershed.cause"

// TellCause tells the publisher of a write that is traced. Nobody waits for it, and nothing but a trace is lost where
// it does not come or comes late.
func TellCause(nc *nats.Conn, c *logv1.Cause) {
	data, err := proto.Marshal(c)
	if err == nil {
		err = nc.Publish(CauseSubject, data)
	}
	if err != nil {
		slog.Debug("The publisher cannot be told of a traced write", "error", err)
	}
}

// HearCauses calls each with the writes that registries tell of, until the subscription ends.
func HearCauses(nc *nats.Conn, each func(*logv1.Cause)) (*nats.Subscription, error) {
	return nc.Subscribe(CauseSubject, func(m *nats.Msg) {
		c := &logv1.Cause{}
		if err := proto.Unmarshal(m.Data, c); err == nil {
			each(c)
		}
	})
}
