package eventlog

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/test/harness"
)

func TestReplayReturnsLaterEvents(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for r := int64(11); r < 60; r++ {
		c.write(added(r, []string{"pods", "nodes"}[r%2]))
	}
	replay := func(after, until int64) (string, error) {
		got := ""
		ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
		defer cancel()
		err := eventlog.Main.Replay(ctx, c.stored(), "pods", after, "", func(e *logv1.Event) (bool, error) {
			got += fmt.Sprintf("%s%d ", map[bool]string{true: "-"}[e.Type == logv1.Type_TYPE_UNSPECIFIED], e.Revision)
			return e.Revision < until, nil
		})
		return got, err
	}
	for _, x := range []struct {
		after, until int64
		want         string
	}{{10, 14, "12 14 "}, {11, 12, "12 "}, {12, 16, "14 16 "}, {50, 58, "52 54 56 58 "}} {
		if got, err := replay(x.after, x.until); err != nil || got != x.want {
			t.Errorf("after %d: %q, %v", x.after, got, err)
		}
	}
	c.write(&logv1.Event{Revision: 60})
	if got, err := replay(58, 60); err != nil || got != "-60 " {
		t.Errorf("progress: %q, %v", got, err)
	}
	w, err := c.writer()
	if err == nil {
		err = w.append(t.Context(), added(61, "pods"), added(62, "pods"), added(63, "pods"), added(64, "pods"))
	}
	if err == nil {
		err = w.flush(t.Context())
	}
	if got, replayErr := replay(62, 64); err != nil || replayErr != nil || got != "63 64 " {
		t.Errorf("from within a batch: %q, %v, %v", got, replayErr, err)
	}
	if got, err := replay(9, 14); !errors.Is(err, eventlog.ErrExpired) || got != "" {
		t.Errorf("from before the log: %q, %v", got, err)
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(20)); err != nil { // up to revision 28
		t.Fatal(err)
	}
	if got, err := replay(27, 32); !errors.Is(err, eventlog.ErrExpired) || got != "" {
		t.Errorf("a replay from removed messages: %q, %v", got, err)
	}
	if got, err := replay(28, 32); err != nil || got != "30 32 " {
		t.Errorf("from the oldest that is kept: %q, %v", got, err)
	}
	c.write(reset(70), added(72, "pods"))
	if got, err := replay(50, 72); !errors.Is(err, eventlog.ErrExpired) {
		t.Errorf("over a reset: %q, %v", got, err)
	}
}

// TestAReplayThatIsOvertakenSaysSo checks that a replay fails if retention removes its next message. The events before
// that have no gap (F2).
func TestAReplayThatIsOvertakenSaysSo(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	const last = 10 + 700
	for r := int64(11); r <= last; r++ {
		c.write(added(r, "pods"))
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	next, purged := int64(11), false
	err = eventlog.Main.Replay(t.Context(), c.stored(), "pods", 10, "", func(e *logv1.Event) (bool, error) {
		if e.Revision != next {
			t.Fatalf("after %d came %d", next-1, e.Revision)
		}
		next++
		if !purged { // retention removes much later messages
			purged = true
			if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(650)); err != nil {
				t.Fatal(err)
			}
		}
		return e.Revision < last, nil
	})
	if !errors.Is(err, eventlog.ErrExpired) {
		t.Errorf("it ended at %d with %v", next-1, err)
	}
}

// TestAReplayOverALostMessageSaysSo checks that a replay fails if the stream has lost a message after its beginning. A
// message that was lost before affects no replay.
func TestAReplayOverALostMessageSaysSo(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for r := int64(11); r <= 30; r++ {
		c.write(added(r, "pods"))
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(t.Context(), 10); err != nil { // revision 19
		t.Fatal(err)
	}
	for after, want := range map[int64]error{12: eventlog.ErrExpired, 17: eventlog.ErrExpired, 19: nil, 25: nil} {
		next := after + 1
		err := eventlog.Main.Replay(t.Context(), c.stored(), "pods", after, "", func(e *logv1.Event) (bool, error) {
			if e.Revision != next {
				t.Errorf("after %d came %d", next-1, e.Revision)
			}
			next++
			return e.Revision < 30, nil
		})
		if !errors.Is(err, want) {
			t.Errorf("a replay after %d ended at %d with %v", after, next-1, err)
		}
	}
}

// TestAReplayWhoseRestIsGoneSaysSo checks that a replay fails at once if its remaining messages are gone.
func TestAReplayWhoseRestIsGoneSaysSo(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for r := int64(11); r <= 600; r++ {
		c.write(added(r, "pods"))
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	err = eventlog.Main.Replay(ctx, c.stored(), "pods", 10, "", func(e *logv1.Event) (bool, error) {
		return true, stream.Purge(ctx)
	})
	if !errors.Is(err, eventlog.ErrExpired) {
		t.Error(err)
	}
}

// TestAReplayOverARecreatedStreamMayBeRepeated checks that a replay does not report expired messages if the stream is
// recreated, or has no message yet: the publisher may refill the log.
func TestAReplayOverARecreatedStreamMayBeRepeated(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	recreate := func() error {
		if err := c.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
			return err
		}
		_, err := c.js.CreateStream(t.Context(), stream.CachedInfo().Config)
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	for _, begin := range []string{"before", "after"} {
		err := eventlog.Main.Replay(ctx, c.stored(), "pods", 10, "e", func(*logv1.Event) (bool, error) {
			return true, recreate()
		})
		if err == nil || errors.Is(err, eventlog.ErrExpired) || ctx.Err() != nil {
			t.Errorf("a replay that begins %s the stream is recreated ends with %v", begin, err)
		}
	}
}
