package eventlog

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/test/harness"
)

// cluster is a NATS server that can be restarted.
type cluster struct {
	t      testing.TB
	dir    string
	mu     sync.Mutex
	server *natsserver.Server
	log    eventlog.Options
	nc     *nats.Conn
	js     jetstream.JetStream
}

// InProcessConn implements nats.InProcessConnProvider with the current server.
func (c *cluster) InProcessConn() (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		return nil, errors.New("no server")
	}
	return c.server.InProcessConn()
}

func start(t testing.TB) *cluster {
	c := &cluster{t: t, dir: harness.TempDir(t)}
	c.run()
	t.Cleanup(c.stop)
	c.log = eventlog.Options{Storage: "file", Replicas: 1, Retention: time.Hour, MaxBytes: 512 << 20, Conn: c}
	nc, err := c.log.Connect("test", rpc.TLS{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	c.nc, c.js = nc, js
	c.begin()
	return c
}

// stored returns the stream in the way that registries read it.
func (c *cluster) stored() eventlog.StreamReader { return eventlog.DirectGetReader{JS: c.js} }

func (c *cluster) run() {
	s, err := natsserver.NewServer(&natsserver.Options{
		JetStream:  true,
		StoreDir:   c.dir,
		DontListen: true,
		NoLog:      true,
		NoSigs:     true,
		MaxPayload: 32 << 20,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(harness.Soon) {
		c.t.Fatal("NATS does not start")
	}
	c.mu.Lock()
	c.server = s
	c.mu.Unlock()
}

func (c *cluster) stop() {
	c.mu.Lock()
	s := c.server
	c.server = nil
	c.mu.Unlock()
	if s != nil {
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// begin creates the stream.
func (c *cluster) begin() {
	c.t.Helper()
	// retries as publishers do, because NATS may still be removing the files of a deleted stream
	harness.Eventually(c.t, harness.Soon, func() error {
		_, err := c.log.Stream(c.t.Context(), c.js)
		return err
	})
}

// write appends events as the publisher does, until the log has them. Each attempt uses a new writer.
func (c *cluster) write(events ...*logv1.Event) {
	c.t.Helper()
	for _, e := range events {
		harness.Eventually(c.t, harness.Soon, func() error {
			w, err := c.writer()
			if err != nil {
				return err
			}
			if w.Has(e) {
				return nil
			}
			if err := w.append(c.t.Context(), e); err != nil {
				return err
			}
			return w.flush(c.t.Context())
		})
	}
}

// replace recreates the stream with the same messages. change alters the message of a sequence, which keeps its
// checksum.
func (c *cluster) replace(sequence int, change func(*nats.Msg)) {
	c.t.Helper()
	var messages []*nats.Msg
	for {
		m, err := eventlog.Main.Get(c.t.Context(), c.js, uint64(len(messages)+1))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			c.t.Fatal(err)
		}
		messages = append(messages, &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data})
	}
	if err := c.js.DeleteStream(c.t.Context(), eventlog.StreamName); err != nil {
		c.t.Fatal(err)
	}
	c.begin()
	for i, m := range messages {
		if i+1 == sequence {
			sum := m.Header.Get("Watershed-Checksum")
			change(m)
			m.Header.Set("Watershed-Checksum", sum)
		}
		if _, err := c.js.PublishMsg(c.t.Context(), m); err != nil {
			c.t.Fatal(err)
		}
	}
}

// last returns the ID of the log's last message.
func (c *cluster) last() string {
	w, err := c.writer()
	if err != nil {
		c.t.Fatal(err)
	}
	return w.Last.String()
}

// writer appends events to the log as a publisher does.
type writer struct {
	core.Chain
	log  *eventlog.Writer
	sent core.ID
}

// writer returns a writer that continues after the log's last message, or begins an empty log.
func (c *cluster) writer() (*writer, error) {
	last, sequence, ok, err := eventlog.Main.Last(c.t.Context(), c.js)
	if err != nil {
		return nil, err
	}
	log, err := eventlog.Main.NewWriter(c.t.Context(), c.js)
	if err != nil {
		return nil, err
	}
	w := &writer{core.NewChain(rand.Text()+"-", last, sequence, eventlog.Encode(32<<20)), log, last}
	if !ok {
		w.Restart()
	}
	return w, nil
}

// append sends events together.
func (w *writer) append(ctx context.Context, events ...*logv1.Event) error {
	var messages []core.LogEntry
	for _, e := range events {
		m, err := w.Append(e)
		if err != nil {
			return err
		}
		messages = append(messages, m)
		w.sent = m.ID
	}
	if err := w.log.Add(ctx, messages...); err != nil {
		return err
	}
	return w.log.Flush(ctx)
}

// flush waits until the log has stored all events.
func (w *writer) flush(ctx context.Context) error {
	for {
		select {
		case ack := <-w.log.Acks():
			if ack.Err != nil || ack.ID == w.sent {
				return ack.Err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func added(revision int64, of string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        revision,
		StorageResource: of,
		Name:            fmt.Sprint("o", revision),
		Object:          &logv1.Object{Json: []byte("{}")},
	}
}

func reset(revision int64) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}
}

// reading records the events that a reader receives.
type reading struct {
	mu   sync.Mutex
	seen string
}

func (c *cluster) read() *reading {
	r := &reading{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = eventlog.Main.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
			r.add(e)
			return nil
		})
	}()
	c.t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *reading) add(e *logv1.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	mark := map[logv1.Type]string{logv1.Type_TYPE_RESET: "!", logv1.Type_TYPE_UNSPECIFIED: "-"}[e.Type]
	r.seen += fmt.Sprintf("%s%d ", mark, e.Revision)
}

func (r *reading) is(t *testing.T, want string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.seen != want {
			return fmt.Errorf("read %q, not %q", r.seen, want)
		}
		return nil
	})
}
