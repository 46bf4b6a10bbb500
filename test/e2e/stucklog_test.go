package e2e

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/test/harness"
)

// publishAsRegistry publishes a message to the log of split, and returns JetStream's error.
func publishAsRegistry(t *testing.T, s *harness.Server, headers nats.Header) error {
	t.Helper()
	js, err := harness.RegistryJetStream(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer js.Conn().Close()
	_, err = js.PublishMsg(t.Context(), &nats.Msg{Subject: eventlog.Subject("configmaps"), Header: headers,
		Data: []byte("not an event")}, jetstream.WithRetryAttempts(0))
	return err
}

// TestAStuckLogIsAbandoned checks the log of three NATS servers. It rejects a message of a deposed publisher, and goes
// on. All copies of the stream stop after a message that expects only another ID. The publisher then begins another
// stream, and no watch ends.
func TestAStuckLogIsAbandoned(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "", "--replicas=nats=3")
	m := watchMaps(t, s)
	m.add("before")
	var rejected *jetstream.APIError
	deposed := nats.Header{jetstream.ExpectedLastSeqHeader: {"1"}, jetstream.ExpectedLastMsgIDHeader: {"1.0.other-1"}}
	harness.Eventually(t, harness.Soon, func() error { // a response of JetStream has 5 s
		err := publishAsRegistry(t, s, deposed)
		if err == nil {
			t.Fatal("the log has accepted the message of a deposed publisher")
		}
		if !errors.As(err, &rejected) {
			return err
		}
		return nil
	})
	m.add("after-a-deposed-publisher")
	if err := publishAsRegistry(t, s, nats.Header{jetstream.ExpectedLastMsgIDHeader: {"1.0.other-1"}}); err == nil {
		t.Error("the log has accepted a message after another than the last")
	}
	began := time.Now() // the publisher waits for 9 s first
	m.add("after-the-copies-have-stopped")
	t.Logf("the event came after %v", time.Since(began).Round(time.Millisecond))
}
