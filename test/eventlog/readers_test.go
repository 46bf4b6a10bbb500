package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/test/harness"
)

// consumers returns how many consumers the stream has.
func (c *cluster) consumers() int {
	c.t.Helper()
	stream, err := c.js.Stream(c.t.Context(), eventlog.StreamName)
	if err != nil {
		c.t.Fatal(err)
	}
	return stream.CachedInfo().State.Consumers
}

// TestReadersHaveNoConsumer checks that readers and replays create no consumer (N3).
func TestReadersHaveNoConsumer(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	c.read().is(t, "!10 11 ")
	if err := eventlog.Main.Replay(t.Context(), c.stored(), "pods", 10, "", func(*logv1.Event) (bool, error) {
		if n := c.consumers(); n != 0 {
			t.Errorf("%d consumers", n)
		}
		return false, nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestAnOlderStreamIsUpdated checks that an older release's stream is updated in place. It keeps its messages, loses
// its consumers, and accepts one consumer, which is JetStream's smallest limit.
func TestAnOlderStreamIsUpdated(t *testing.T) {
	c := start(t)
	if err := c.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
		t.Fatal(err)
	}
	config := jetstream.StreamConfig{
		Name:       eventlog.StreamName,
		Subjects:   []string{"watershed.event.>", "watershed.progress"},
		Replicas:   1,
		MaxAge:     time.Hour,
		MaxBytes:   512 << 20,
		Duplicates: time.Second,
	}
	var stream jetstream.Stream
	harness.Eventually(t, harness.Soon, func() (err error) {
		stream, err = c.js.CreateStream(t.Context(), config)
		return err
	})
	c.write(reset(10), added(11, "pods"))
	const many = 900
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon) // instead of the 5 s of a context without a deadline
	defer cancel()
	for n := range many {
		if _, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
			Name:              fmt.Sprint("old", n),
			InactiveThreshold: 24 * time.Hour,
			AckPolicy:         jetstream.AckNonePolicy,
		}); err != nil {
			t.Fatal(err)
		}
	}
	created := stream.CachedInfo().Created
	began := time.Now()
	c.begin()
	t.Logf("%d consumers are deleted in %v", many, time.Since(began))
	after, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if i := after.CachedInfo(); !i.Created.Equal(created) || i.State.Msgs != 2 || i.State.Consumers != 0 {
		t.Errorf("made at %v, not %v; %d messages, %d consumers", i.Created, created, i.State.Msgs, i.State.Consumers)
	}
	r := c.read()
	r.is(t, "!10 11 ")
	c.write(added(12, "pods"))
	r.is(t, "!10 11 12 ")
	for n := range 3 {
		_, err = after.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: fmt.Sprint("new", n)})
	}
	if err == nil {
		t.Error("the stream accepts more than one consumer")
	}
}

// TestASlowReaderMissesNothing checks a reader that exceeds the pending limits of its subscription. It reads the
// dropped messages from the stream.
func TestASlowReaderMissesNothing(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	const last = 10 + 40_000 // more than the pending limit
	next, failed := int64(10), make(chan error, 1)
	hold := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	go func() {
		failed <- eventlog.Main.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
			if e.Revision != next {
				return fmt.Errorf("read %v %d, not %d", e.Type, e.Revision, next)
			}
			if next++; e.Revision == 11 {
				<-hold
			}
			if e.Revision == last {
				return errEnough
			}
			return nil
		})
	}()
	w, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	for r := int64(11); r <= last; r++ {
		if err := w.append(ctx, added(r, "pods")); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.flush(ctx); err != nil {
		t.Fatal(err)
	}
	close(hold)
	if err := <-failed; !errors.Is(err, errEnough) {
		t.Error(err)
	}
}

var errEnough = errors.New("enough")

// TestALostLastMessageIsFound checks that a reader finds a lost last message in the stream.
func TestALostLastMessageIsFound(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	r := c.read()
	r.is(t, "!10 11 ")
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	config := stream.CachedInfo().Config
	config.RePublish = nil // so no reader receives the next message
	if _, err := c.js.UpdateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	c.write(added(12, "pods"))
	began := time.Now()
	r.is(t, "!10 11 12 ")
	t.Logf("found in %v", time.Since(began))
}

// TestALaggingReplicaHidesNothing checks direct gets from a lagging replica, which returns too few messages, and a lost
// message of a response. The reader gets the missing messages from the leader.
func TestALaggingReplicaHidesNothing(t *testing.T) {
	for name, answer := range map[string]func(c *cluster, m *nats.Msg){
		"it has no message": func(_ *cluster, m *nats.Msg) {
			_ = m.RespondMsg(&nats.Msg{Header: nats.Header{"Status": {"404"}, "Description": {"Message Not Found"}}})
		},
		"it answers none":              func(_ *cluster, m *nats.Msg) { endOfBatch(m) },
		"it is silent":                 func(*cluster, *nats.Msg) {},
		"its first message is lost":    func(c *cluster, m *nats.Msg) { c.directGet(m, 0) },
		"its second message is lost":   func(c *cluster, m *nats.Msg) { c.directGet(m, 1) },
		"none of its messages is lost": func(c *cluster, m *nats.Msg) { c.directGet(m, -1) },
		"it lacks two messages":        func(c *cluster, m *nats.Msg) { c.directGet(m, -1, 4, 5) },
		"it lacks the first message":   func(c *cluster, m *nats.Msg) { c.directGet(m, -1, 3) },
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t)
			c.write(reset(10), added(11, "pods"), added(12, "nodes"), added(13, "pods"), added(14, "nodes"),
				added(15, "nodes"), added(16, "nodes"))
			c.withoutDirectGets()
			sub, err := c.nc.Subscribe("$JS.API.DIRECT.GET."+eventlog.StreamName, func(m *nats.Msg) { answer(c, m) })
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = sub.Unsubscribe() }()
			began := time.Now()
			c.read().is(t, "!10 11 12 13 14 15 16 ")
			if took := time.Since(began); took > 8*time.Second {
				t.Errorf("it took %v to read seven messages", took)
			}
			got := ""
			ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
			defer cancel()
			if err := eventlog.Main.Replay(ctx, c.stored(), "nodes", 10, "", func(e *logv1.Event) (bool, error) {
				got += fmt.Sprintf("%d ", e.Revision)
				return e.Revision < 16, nil
			}); err != nil || got != "12 14 15 16 " {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// TestACanceledReadEndsAtOnce checks that a canceled read does not wait for the response to its direct get.
func TestACanceledReadEndsAtOnce(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	c.withoutDirectGets()
	ctx, cancel := context.WithCancel(t.Context())
	canceled := make(chan time.Time, 1)
	sub, err := c.nc.Subscribe("$JS.API.DIRECT.GET."+eventlog.StreamName, func(*nats.Msg) {
		cancel()
		canceled <- time.Now()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	err = c.stored().Messages(ctx, &logv1.ReadRequest{}, func(*logv1.Chunk) error { return nil })
	if took := time.Since(<-canceled); took > 250*time.Millisecond || !errors.Is(err, context.Canceled) {
		t.Errorf("after %v: %v", took, err)
	}
}

// directGet responds to a direct get as NATS does. The response with the number lost does not arrive. The replica lacks
// some sequences, and its other responses do not show it.
func (c *cluster) directGet(m *nats.Msg, lost int, lacks ...uint64) {
	var request struct {
		Sequence uint64 `json:"seq"`
		Subject  string `json:"next_by_subj"`
	}
	if err := json.Unmarshal(m.Data, &request); err != nil {
		c.t.Error(err)
	}
	stream, err := c.js.Stream(c.t.Context(), eventlog.StreamName)
	before := uint64(0)
	for n := 0; err == nil; n++ {
		var got *jetstream.RawStreamMsg
		got, err = stream.GetMsg(c.t.Context(), request.Sequence, jetstream.WithGetMsgSubject(request.Subject))
		if err != nil {
			break
		}
		if slices.Contains(lacks, got.Sequence) {
			request.Sequence = got.Sequence + 1
			continue
		}
		if n != lost {
			got.Header.Set(jetstream.SequenceHeader, fmt.Sprint(got.Sequence))
			got.Header.Set(jetstream.LastSequenceHeader, fmt.Sprint(before))
			_ = m.RespondMsg(&nats.Msg{Header: got.Header, Data: got.Data})
		}
		before, request.Sequence = got.Sequence, got.Sequence+1
	}
	endOfBatch(m)
}

func endOfBatch(m *nats.Msg) {
	_ = m.RespondMsg(&nats.Msg{Header: nats.Header{"Status": {"204"}, "Description": {"EOB"}}})
}

// withoutDirectGets makes the stream ignore direct gets.
func (c *cluster) withoutDirectGets() {
	c.t.Helper()
	stream, err := c.js.Stream(c.t.Context(), eventlog.StreamName)
	if err != nil {
		c.t.Fatal(err)
	}
	config := stream.CachedInfo().Config
	config.AllowDirect = false
	if _, err := c.js.UpdateStream(c.t.Context(), config); err != nil {
		c.t.Fatal(err)
	}
}
