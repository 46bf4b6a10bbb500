package eventlog

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// memory is a log stream in this process. A test may remove its end.
type memory struct {
	t        *testing.T
	mu       sync.Mutex
	messages []*logv1.StoredMessage
	// failing is the number of reads that fail. failed is the time of the first failed read.
	failing int
	failed  time.Time
}

// append appends events. Each follows the message before it.
func (m *memory) append(events ...*logv1.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range events {
		message, err := eventlog.Message(e)
		if err != nil {
			m.t.Fatal(err)
		}
		stored := &logv1.StoredMessage{
			Sequence: uint64(len(m.messages) + 1),
			Id:       core.IDOf(e, "t").String(),
			Data:     message.Data,
		}
		if n := len(m.messages); n > 0 {
			stored.ExpectedLastMsgId = m.messages[n-1].Id
		}
		m.messages = append(m.messages, stored)
	}
}

// lose removes the messages after a sequence number.
func (m *memory) lose(after int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.messages = m.messages[:after:after]
}

func (m *memory) fail(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failing, m.failed = n, time.Time{}
}

// Messages implements eventlog.Stored.
func (m *memory) Messages(_ context.Context, r *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	m.mu.Lock()
	last := uint64(len(m.messages))
	chunk := &logv1.Chunk{Created: 1, Last: last, Through: last}
	if r.Sequence <= last {
		chunk.Messages = m.messages[max(r.Sequence, 1)-1:]
	}
	fails := m.failing > 0
	if fails {
		m.failing--
		if m.failed.IsZero() {
			m.failed = time.Now()
		}
	}
	m.mu.Unlock()
	if fails {
		return errors.New("the stream has no leader")
	}
	return each(chunk)
}

// readOf starts a reader of a memory. The reader calls handle for each event before it records the event.
func (c *cluster) readOf(m *memory, handle func(*logv1.Event)) *reading {
	r := &reading{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = eventlog.Main.Read(ctx, c.nc, m, func(e *logv1.Event) error {
			handle(e)
			r.add(e)
			return nil
		})
	}()
	c.t.Cleanup(func() { cancel(); <-done })
	return r
}

// nudge makes readers compare their position with the stream.
func (c *cluster) nudge() {
	c.t.Helper()
	m := nats.NewMsg("watershed.stored.x")
	m.Header.Set("Nats-Sequence", fmt.Sprint(1<<40))
	if err := c.nc.PublishMsg(m); err != nil {
		c.t.Fatal(err)
	}
}

// TestALostEndThatIsRefilledIsAReset checks a log that loses its end and gets other messages in its place. A reader
// finds that its last message was replaced, although the stream is as long as before.
func TestALostEndThatIsRefilledIsAReset(t *testing.T) {
	c, m := start(t), &memory{t: t}
	m.append(reset(10), added(11, "pods"), added(12, "pods"), added(13, "pods"), added(14, "pods"))
	r := c.readOf(m, func(*logv1.Event) {})
	r.is(t, "!10 11 12 13 14 ")
	m.lose(2)
	m.append(added(22, "pods"), added(23, "pods"))
	c.nudge()
	r.is(t, "!10 11 12 13 14 !22 23 ")
	m.append(added(24, "pods"))
	c.nudge()
	r.is(t, "!10 11 12 13 14 !22 23 24 ")
}

// TestANewConnectionIsComparedUntilThatSucceeds checks that a reader with a new connection compares itself with the
// stream until the comparison succeeds. It does not wait for 3 s without messages.
func TestANewConnectionIsComparedUntilThatSucceeds(t *testing.T) {
	c, m := start(t), &memory{t: t}
	m.append(reset(10), added(11, "pods"))
	r := c.readOf(m, func(*logv1.Event) {})
	r.is(t, "!10 11 ")
	m.fail(2)
	c.stop()
	m.append(added(12, "pods"))
	c.run()
	r.is(t, "!10 11 12 ")
	m.mu.Lock()
	defer m.mu.Unlock()
	if took := time.Since(m.failed); m.failing > 0 || took > 2*time.Second {
		t.Errorf("found %v after the first comparison failed", took)
	}
}

// TestADroppedLastMessageIsFoundAtOnce checks that a reader reads the stream at once if NATS' client reports dropped
// messages, because the last message may be among them.
func TestADroppedLastMessageIsFoundAtOnce(t *testing.T) {
	c, m := start(t), &memory{t: t}
	m.append(reset(10), added(11, "pods"))
	began, hold := make(chan struct{}), make(chan struct{})
	r := c.readOf(m, func(e *logv1.Event) {
		if e.Revision == 12 {
			close(began)
			<-hold
		}
	})
	r.is(t, "!10 11 ")
	m.append(added(12, "pods"))
	c.nudge()
	<-began
	for range 20_000 { // more than the pending limit
		if err := c.nc.Publish("watershed.stored.x", nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	m.append(added(13, "pods"))
	close(hold)
	released := time.Now()
	r.is(t, "!10 11 12 13 ")
	if took := time.Since(released); took > 2*time.Second {
		t.Errorf("found after %v", took)
	}
}
