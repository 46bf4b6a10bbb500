package stores

import (
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// inner is the identities of an inner network.
func inner(t *testing.T) func(name string) rpc.TLS {
	t.Helper()
	dir := t.TempDir()
	ca, err := pki.OpenCA(dir, "inner-ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	return func(name string) rpc.TLS {
		crt, key, _, err := ca.Leaf(pki.Leaf{
			Name:       name,
			CommonName: name,
			SANs:       []string{name, "127.0.0.1"},
			Usage:      pki.Client | pki.Server,
		})
		if err != nil {
			t.Fatal(err)
		}
		return rpc.TLS{CertFile: crt, KeyFile: key, CAFile: ca.CertFile()}
	}
}

func natsServer(t *testing.T, id rpc.TLS) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	key := filepath.Join(t.TempDir(), "key")
	if err := pki.SecretKey(key); err != nil {
		t.Fatal(err)
	}
	srv, err := (&NATS{Dir: t.TempDir(), KeyFile: key, Address: address, ID: id}).start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	return "tls://" + address
}

// Registry writes the log and watchfanout reads it; neither may do more, and nobody else may do anything (S18).
func TestNATSIsByAllowLists(t *testing.T) {
	ids := inner(t)
	url := natsServer(t, ids("nats"))
	log := eventlog.Options{URL: url, Storage: "file", Replicas: 1, Retention: time.Minute, MaxBytes: 1 << 20}
	registry, js, err := log.Connect("registry", ids("registry"))
	if err != nil {
		t.Fatal(err)
	}
	defer registry.Close()
	if _, err := log.Stream(t.Context(), js); err != nil {
		t.Fatal(err)
	}
	last := ""
	publish := func(revision int64) {
		t.Helper()
		m, err := eventlog.Message(&logv1.Event{
			Type:     logv1.Type_TYPE_ADDED,
			Revision: revision,
			StoredAs: "pods",
			Name:     "a",
			Object:   &logv1.Object{},
		})
		if err != nil {
			t.Fatal(err)
		}
		if last != "" {
			m.Header.Set("Nats-Expected-Last-Msg-Id", last)
		}
		last = fmt.Sprintf("%d.0.t", revision)
		m.Header.Set("Nats-Msg-Id", last)
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	publish(11)
	reader, rjs, err := log.Connect("watchfanout", ids("watchfanout"))
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	seen := make(chan int64, 10)
	go func() {
		_ = eventlog.Read(t.Context(), rjs, func(e *logv1.Event) error { seen <- e.Revision; return nil })
	}()
	for _, want := range []int64{11, 12} {
		if want == 12 {
			publish(12)
		}
		select {
		case got := <-seen:
			if got != want {
				t.Errorf("read %d, want %d", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("watchfanout does not read %d", want)
		}
	}
	if err := eventlog.Replay(t.Context(), rjs, "pods", 11, func(e *logv1.Event) (bool, error) {
		return e.Revision < 12, nil
	}); err != nil {
		t.Errorf("watchfanout does not replay: %v", err)
	}
	asked, err := registry.SubscribeSync(eventlog.AskProgress)
	if err != nil {
		t.Fatal(err)
	}
	if err := registry.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := reader.Publish(eventlog.AskProgress, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := asked.NextMsg(5 * time.Second); err != nil {
		t.Errorf("watchfanout may not ask how far the publisher is: %v", err)
	}
	// What watchfanout may not do. A request that is refused is not answered.
	for _, subject := range []string{
		"$JS.API.STREAM.LEADER.STEPDOWN.watershed", "$JS.API.STREAM.PURGE.watershed", "$JS.API.STREAM.DELETE.watershed",
		"$JS.API.STREAM.UPDATE.watershed",
		"$JS.API.STREAM.CREATE.other", "$JS.API.STREAM.SNAPSHOT.watershed", "$JS.API.STREAM.PEER.REMOVE.watershed",
		"$JS.API.STREAM.MSG.DELETE.watershed",
		"$JS.API.CONSUMER.NAMES.watershed", "$JS.API.CONSUMER.LIST.watershed", "$JS.API.CONSUMER.PAUSE.watershed.x",
		"$JS.API.STREAM.LIST", "$JS.API.INFO",
		"watershed.event.pods", "watershed.progress", eventlog.CauseSubject,
	} {
		if m, err := reader.Request(subject, nil, 200*time.Millisecond); err == nil {
			t.Errorf("watchfanout may %s: %s", subject, m.Data)
		}
	}
	next := int64(100)
	for _, subject := range []string{">", "_INBOX.>", eventlog.Inbox("registry") + ".>", "watershed.event.>",
		eventlog.AskProgress, eventlog.CauseSubject, "$JS.API.>"} {
		sub, err := reader.SubscribeSync(subject)
		if err == nil {
			err = reader.Flush()
		}
		if err == nil {
			publish(next)
			next++
			if m, merr := sub.NextMsg(200 * time.Millisecond); merr == nil {
				t.Errorf("watchfanout hears %s on %s", m.Subject, subject)
			}
			_ = sub.Unsubscribe()
		}
	}
	// Other services of the inner network are nobody to NATS.
	conf, err := ids("gateway").ClientConfig("nats")
	if err != nil {
		t.Fatal(err)
	}
	if nc, err := nats.Connect(url, nats.Secure(conf), nats.MaxReconnects(0)); err == nil {
		nc.Close()
		t.Error("a gateway may connect to NATS")
	}
}
