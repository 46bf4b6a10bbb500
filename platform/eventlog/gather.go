package eventlog

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// gather sends a request to all subscribers of a subject, and calls receive for each response. It ends after limit
// responses, after timeout, after pause without a further response, or if there is no subscriber.
func gather(ctx context.Context, nc *nats.Conn, subject string, timeout, pause time.Duration, limit int,
	receive func(data []byte)) error {
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := nc.PublishRequest(subject, inbox, nil); err != nil {
		return err
	}
	end := time.Now().Add(timeout)
	for next := end; limit > 0; limit-- {
		wait, cancel := context.WithDeadline(ctx, next)
		m, err := sub.NextMsgWithContext(wait)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrNoResponders):
			return nil
		case err != nil:
			return err
		}
		receive(m.Data)
		if next = time.Now().Add(pause); next.After(end) {
			next = end
		}
	}
	return nil
}

// reportSubject is the subject of requests for the reports of the NATS servers' processes.
const reportSubject = subjectRoot + "report.request"

// The number of servers that run is unknown: it may be above or below the number of the log's replicas. Reports waits
// reportTimeout at most, and reportPause for each response after the first.
const (
	reportTimeout = time.Second
	reportPause   = 200 * time.Millisecond
)

// maxReports bounds the responses that Reports reads.
const maxReports = 16

// Reports requests the reports of the processes of all NATS servers, and calls receive for each response, at most
// maxReports times. A foreign server does not respond.
func Reports(ctx context.Context, nc *nats.Conn, receive func(report []byte)) error {
	return gather(ctx, nc, reportSubject, reportTimeout, reportPause, maxReports, receive)
}

// mayNotRequestReports reports whether a NATS server does not permit Reports: its release is older, or it has
// permissions of its own.
func mayNotRequestReports(err error) bool {
	return errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), `"`+reportSubject+`"`)
}

// ServeReport responds to Reports with the result of report.
func ServeReport(nc *nats.Conn, report func() ([]byte, error)) error {
	_, err := nc.Subscribe(reportSubject, func(m *nats.Msg) {
		if data, err := report(); err == nil {
			_ = m.Respond(data)
		}
	})
	return err
}
