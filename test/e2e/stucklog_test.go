package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	watchtools "k8s.io/client-go/tools/watch"

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

// TestALogWithoutALeaderStays freezes two of three NATS servers for longer than the time after which a stuck log is
// abandoned. Without a leader of the servers another stream cannot be created, and the publisher deletes none. Writes
// continue meanwhile. A watch resumes when the servers are back, and has every event.
func TestALogWithoutALeaderStays(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "", "--replicas=nats=3")
	m := watchMaps(t, s)
	m.add("before")
	created := func() (at time.Time) {
		js, err := harness.RegistryJetStream(s.Dir)
		if err != nil {
			t.Fatal(err)
		}
		defer js.Conn().Close()
		harness.Eventually(t, harness.Soon, func() error {
			stream, err := js.Stream(t.Context(), eventlog.StreamName)
			if err == nil {
				at = stream.CachedInfo().Created
			}
			return err
		})
		return at
	}
	began := created()
	before, err := m.client.Get(t.Context(), "before", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	resumed, err := watchtools.NewRetryWatcherWithContext(t.Context(), before.ResourceVersion, watchClient{m.client})
	if err != nil {
		t.Fatal(err)
	}
	defer resumed.Stop()
	var frozen []int
	for _, name := range []string{"nats-1.pid", "nats-2.pid"} {
		_, process := readPID(t, filepath.Join(s.Dir, name))
		freeze(t, process)
		frozen = append(frozen, process)
	}
	harness.Eventually(t, harness.Soon, func() error {
		for _, name := range []string{"registry-0.log", "registry-1.log"} {
			log, err := os.ReadFile(filepath.Join(s.Dir, name))
			// A server without a majority responds that JetStream is unavailable, or not at all.
			if err != nil || bytes.Contains(log, []byte(eventlog.ErrUnanswered.Error())) ||
				bytes.Contains(log, []byte("no event could be published for a while")) {
				return err
			}
		}
		return errors.New("no publisher has given up")
	})
	harness.Write(t, func() error { return m.create("without-a-leader") })
	for _, process := range frozen {
		if err := syscall.Kill(process, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	e := next(t, resumed)
	if o, isMap := e.Object.(*corev1.ConfigMap); !isMap || o.Name != "without-a-leader" {
		t.Errorf("the watch receives %s %+v", e.Type, e.Object)
	}
	if at := created(); !at.Equal(began) {
		t.Errorf("the stream was deleted: it began at %v, and is of %v now", began, at)
	}
}

// watchClient opens the watches of a RetryWatcher.
type watchClient struct{ typedcorev1.ConfigMapInterface }

// WatchWithContext implements cache.WatcherWithContext.
func (c watchClient) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return c.Watch(ctx, o)
}
