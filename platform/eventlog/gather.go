package eventlog

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// gather sends a request to all subscribers of a subject, and calls receive for each response. It ends after limit
// responses, after timeout, or if there is no subscriber.
func gather(ctx context.Context, nc *nats.Conn, subject string, timeout time.Duration, limit int,
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
	wait, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for range limit {
		m, err := sub.NextMsgWithContext(wait)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrNoResponders):
			return nil
		case err != nil:
			return err
		}
		receive(m.Data)
	}
	return nil
}

// reportSubject is the subject of requests for the reports of the NATS servers' processes.
const reportSubject = subjectRoot + "report.request"

// The number of servers that run is unknown: it may be above or below the number of the log's replicas. Reports waits
// reportTimeout for the first response, and reportPause for each further response.
const (
	reportTimeout = time.Second
	reportPause   = 200 * time.Millisecond
)

// maxReports bounds the responses that Reports reads.
const maxReports = 16

// Reports requests the reports of the processes of all NATS servers, and calls receive for each response, at most
// maxReports times. A foreign server does not respond.
func Reports(ctx context.Context, nc *nats.Conn, receive func(report []byte)) error {
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	pause := time.AfterFunc(reportTimeout, cancel)
	defer pause.Stop()
	err := gather(wait, nc, reportSubject, reportTimeout, maxReports, func(report []byte) {
		pause.Reset(reportPause)
		receive(report)
	})
	if wait.Err() != nil && ctx.Err() == nil {
		return nil
	}
	return err
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
