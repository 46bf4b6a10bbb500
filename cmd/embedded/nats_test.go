package embedded

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// inner holds the identities of an inner network.
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

// freeAddress returns an address without a listener.
func freeAddress(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
}

// natsServer runs a server until the test ends, and returns its URL.
func natsServer(t *testing.T, id rpc.TLS) string {
	t.Helper()
	address := freeAddress(t)
	srv, err := (&NATS{Dir: t.TempDir(), KeyFile: secretKey(t), Address: address, ID: id}).start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	return "tls://" + address
}

// tenants is a NATS server with its clients.
type tenants struct {
	t   *testing.T
	ids func(string) rpc.TLS
	url string
	log eventlog.Options
	// last is the id of the last message of the log.
	last string
	js   jetstream.JetStream
}

func newTenants(t *testing.T) *tenants {
	ids := inner(t)
	n := &tenants{t: t, ids: ids, url: natsServer(t, ids("nats"))}
	n.log = eventlog.Options{URL: n.url, Storage: "file", Replicas: 1, Retention: time.Minute, MaxBytes: 1 << 20}
	_, n.js = n.connect("registry")
	if _, err := n.log.Stream(t.Context(), n.js); err != nil {
		t.Fatal(err)
	}
	return n
}

// expectResponse checks that NATS permits a request to an API of JetStream.
func (n *tenants) expectResponse(nc *nats.Conn, api string) {
	n.t.Helper()
	if _, err := nc.Request("$JS.API."+api, []byte("{}"), 2*time.Minute); err != nil {
		n.t.Errorf("%s: %v", api, err)
	}
}

func (n *tenants) connect(name string) (*nats.Conn, jetstream.JetStream) {
	n.t.Helper()
	return connectTo(n.t, &n.log, name, n.ids(name))
}

// connectTo connects a service to the log.
func connectTo(t *testing.T, log *eventlog.Options, service string, id rpc.TLS) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := log.Connect(service, id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// publish appends an event to the log.
func (n *tenants) publish(revision int64) {
	n.t.Helper()
	m, err := eventlog.Message(&logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        revision,
		StorageResource: "pods",
		Name:            "a",
		Object:          &logv1.Object{},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if n.last != "" {
		m.Header.Set("Nats-Expected-Last-Msg-Id", n.last)
	}
	n.last = fmt.Sprintf("%d.0.t", revision)
	m.Header.Set("Nats-Msg-Id", n.last)
	if _, err := n.js.PublishMsg(n.t.Context(), m); err != nil {
		n.t.Fatal(err)
	}
}

// read starts a watchfanout that reads the log, and returns its events. A registry reads the stream for it.
func (n *tenants) read() <-chan int64 {
	nc, _ := n.connect("watchfanout")
	seen := make(chan int64, 100)
	go func() {
		_ = eventlog.Main.Read(n.t.Context(), nc, eventlog.DirectGetReader{JS: n.js}, func(e *logv1.Event) error {
			seen <- e.Revision
			return nil
		})
	}()
	return seen
}

func (n *tenants) expect(seen <-chan int64, want int64) {
	n.t.Helper()
	select {
	case got := <-seen:
		if got != want {
			n.t.Errorf("read %d, want %d", got, want)
		}
	case <-time.After(2 * time.Minute):
		n.t.Fatalf("watchfanout does not read %d", want)
	}
}

// state returns the configuration and the messages of the stream.
func (n *tenants) state() string {
	n.t.Helper()
	s, err := n.js.Stream(n.t.Context(), eventlog.StreamName)
	if err != nil {
		n.t.Fatal(err)
	}
	i := s.CachedInfo()
	config, err := json.Marshal(i.Config)
	if err != nil {
		n.t.Fatal(err)
	}
	return fmt.Sprintf("%s %d to %d, %d consumers, made at %v", config, i.State.FirstSeq, i.State.LastSeq,
		i.State.Consumers, i.Created)
}

// apis are subjects of JetStream's API.
var apis = []string{
	"INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.CREATE.watershed", "STREAM.CREATE.other", "STREAM.UPDATE.watershed",
	"STREAM.INFO.watershed", "STREAM.DELETE.watershed", "STREAM.PURGE.watershed", "STREAM.SNAPSHOT.watershed",
	"STREAM.RESTORE.watershed", "STREAM.PEER.REMOVE.watershed", "STREAM.LEADER.STEPDOWN.watershed",
	"STREAM.MSG.GET.watershed", "STREAM.MSG.DELETE.watershed", "DIRECT.GET.watershed",
	"DIRECT.GET.watershed.watershed.event.pods", "CONSUMER.NAMES.watershed", "CONSUMER.LIST.watershed",
	"CONSUMER.INFO.watershed.x", "CONSUMER.CREATE.watershed", "CONSUMER.CREATE.watershed.x",
	"CONSUMER.CREATE.watershed.x.watershed.event.pods", "CONSUMER.DURABLE.CREATE.watershed.x",
	"CONSUMER.DELETE.watershed.x", "CONSUMER.PAUSE.watershed.x", "CONSUMER.MSG.NEXT.watershed.x",
	"CONSUMER.LEADER.STEPDOWN.watershed.x", "META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.log",
}

// The registry writes the log and watchfanout receives it. Neither may do more, and no other service may connect (S18).
func TestNATSIsByAllowLists(t *testing.T) {
	n := newTenants(t)
	n.publish(11)
	seen := n.read()
	n.expect(seen, 11)
	n.publish(12)
	n.expect(seen, 12)
	registry, _ := n.connect("registry")
	requests, err := registry.SubscribeSync(eventlog.ProgressRequestSubject)
	if err != nil {
		t.Fatal(err)
	}
	if err := registry.Flush(); err != nil {
		t.Fatal(err)
	}
	reader, _ := n.connect("watchfanout")
	if err := reader.Publish(eventlog.ProgressRequestSubject, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := requests.NextMsg(2 * time.Minute); err != nil {
		t.Errorf("watchfanout may not ask how far the publisher is: %v", err)
	}
	if _, err := eventlog.Main.ServeObservedEnds(registry, func() []core.LogEnd {
		return []core.LogEnd{{Last: core.ID{Revision: 12}}}
	}); err != nil {
		t.Fatal(err)
	}
	if err := registry.Flush(); err != nil {
		t.Fatal(err)
	}
	if ends, err := eventlog.Main.ObservedEnds(t.Context(), n.js.Conn()); err != nil || len(ends) != 1 ||
		ends[0].Last.Revision != 12 {
		t.Errorf("a registry cannot ask another for the end that it has read: %v, %v", ends, err)
	}
	next := int64(100)
	for _, subject := range []string{">", "_INBOX.>", "_INBOX_registry.>", "_INBOX_watchfanout.>", "watershed.event.>",
		eventlog.ProgressRequestSubject, eventlog.TraceContextSubject, "watershed.end.request", "$JS.API.>", "_R_.>"} {
		sub, err := reader.SubscribeSync(subject)
		if err == nil {
			err = reader.Flush()
		}
		if err == nil {
			n.publish(next)
			next++
			if m, merr := sub.NextMsg(200 * time.Millisecond); merr == nil {
				t.Errorf("watchfanout receives %s on %s", m.Subject, subject)
			}
			_ = sub.Unsubscribe()
		}
	}
	conf, err := n.ids("gateway").ClientConfig("nats")
	if err != nil {
		t.Fatal(err)
	}
	if nc, err := nats.Connect(n.url, nats.Secure(conf), nats.MaxReconnects(0)); err == nil {
		nc.Close()
		t.Error("a gateway may connect to NATS")
	}
}

// The log of another etcd has a stream and subjects of its own. Its readers receive no message of the main log.
func TestLogsOfOtherEtcds(t *testing.T) {
	n := newTenants(t)
	other := n.log
	other.ID = "other"
	if _, err := other.Stream(t.Context(), n.js); err != nil {
		t.Fatal(err)
	}
	registry, _ := n.connect("registry")
	requests, err := registry.SubscribeSync(other.ID.Subject(eventlog.ProgressRequestSubject))
	if err != nil {
		t.Fatal(err)
	}
	if err := registry.Flush(); err != nil {
		t.Fatal(err)
	}
	reader, _ := n.connect("watchfanout")
	seen := make(chan string, 10)
	go func() {
		stream := eventlog.DirectGetReader{JS: n.js, Log: other.ID}
		_ = other.ID.Read(t.Context(), reader, stream, func(e *logv1.Event) error {
			seen <- e.StorageResource
			return nil
		})
	}()
	n.publish(11)
	for i, name := range []string{"events", "leases"} {
		m := nats.NewMsg(other.ID.Subject(eventlog.Subject(name)))
		if m.Data, err = proto.Marshal(&logv1.Event{
			Type:            logv1.Type_TYPE_ADDED,
			Revision:        int64(i + 1),
			StorageResource: name,
		}); err != nil {
			t.Fatal(err)
		}
		m.Header.Set("Nats-Msg-Id", fmt.Sprintf("%d.0.t", i+1))
		if i > 0 {
			m.Header.Set("Nats-Expected-Last-Msg-Id", fmt.Sprintf("%d.0.t", i))
		}
		if _, err := n.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-seen:
			if got != name {
				t.Errorf("read an event of %q, not %q", got, name)
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("the log is not read")
		}
	}
	if err := reader.Publish(other.ID.Subject(eventlog.ProgressRequestSubject), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := requests.NextMsg(2 * time.Minute); err != nil {
		t.Errorf("watchfanout may not request progress of the log: %v", err)
	}
}

// A stolen key of watchfanout changes nothing in NATS: not the stream and not a registry's inbox. Another replica of
// watchfanout still starts and reads (N3).
func TestAStolenKeyOfWatchfanoutChangesNothing(t *testing.T) {
	n := newTenants(t)
	n.publish(11)
	before := n.state()
	registry, _ := n.connect("registry")
	inbox, err := registry.SubscribeSync("_INBOX_registry.x")
	if err != nil {
		t.Fatal(err)
	}
	cause, err := registry.SubscribeSync(eventlog.TraceContextSubject)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := n.connect("watchfanout")
	republished, err := other.SubscribeSync("watershed.stored.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(registry.Flush(), other.Flush()); err != nil {
		t.Fatal(err)
	}
	thief, _ := n.connect("watchfanout")
	consumers := []string{
		`{"stream_name":"watershed","config":{"name":"NAME","inactive_threshold":86400000000000,"ack_policy":"none"}}`,
		`{"stream_name":"watershed","config":{"durable_name":"NAME","ack_policy":"explicit"}}`,
		`{"stream_name":"watershed","config":{"ack_policy":"none","deliver_policy":"all"}}`,
		`{"stream_name":"watershed","config":{"name":"NAME","ack_policy":"none",` +
			`"deliver_subject":"_INBOX_registry.x"}}`,
		`{"stream_name":"watershed","config":{"name":"NAME","ack_policy":"none",` +
			`"deliver_subject":"watershed.tracecontext"}}`,
	}
	for i := range 2000 {
		name := fmt.Sprint("c", i)
		subject := []string{"CREATE.watershed." + name, "DURABLE.CREATE.watershed." + name, "CREATE.watershed"}[i%3]
		body := strings.ReplaceAll(consumers[i%len(consumers)], "NAME", name)
		if err := thief.PublishRequest("$JS.API.CONSUMER."+subject, "_INBOX_watchfanout.x", []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	replies := []string{"watershed.progress", "watershed.event.pods", "watershed.stored.watershed.event.pods",
		"_INBOX_registry.x", "_INBOX_watchfanout.x", eventlog.TraceContextSubject, eventlog.ProgressRequestSubject,
		"watershed.end.request",
		"$JS.API.STREAM.DELETE.watershed", "$JS.ACK.watershed.c1.1.1.1.1.0", "_R_.x"}
	for _, subject := range append(slices.Clone(replies), apis...) {
		for _, reply := range replies {
			for _, s := range []string{subject, "$JS.API." + subject} {
				if s == eventlog.ProgressRequestSubject {
					continue // this publish is allowed, and gets no response
				}
				for _, body := range []string{"", `{"seq":1,"batch":1000000}`} {
					if err := thief.PublishRequest(s, reply, []byte(body)); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
	if err := thief.FlushTimeout(2 * time.Minute); err != nil {
		t.Fatal(err)
	}
	n.publish(12) // it follows every effect of the thief
	m, err := republished.NextMsg(2 * time.Minute)
	if err != nil || m.Header.Get("Nats-Sequence") != "2" {
		t.Errorf("another replica receives %v, %v", m, err)
	}
	if err := registry.FlushTimeout(2 * time.Minute); err != nil {
		t.Fatal(err)
	}
	for _, sub := range []*nats.Subscription{inbox, cause, republished} {
		if pending, _, err := sub.Pending(); err != nil || pending != 0 {
			t.Errorf("%d messages on %s, %v", pending, sub.Subject, err)
		}
	}
	if after, want := n.state(), strings.Replace(before, "1 to 1,", "1 to 2,", 1); after != want {
		t.Errorf("the stream was\n%s, and is\n%s", want, after)
	}
	seen := n.read()
	n.expect(seen, 11)
	n.expect(seen, 12)
	n.publish(13)
	n.expect(seen, 13)
}

// A stolen key of watchfanout has few subscriptions and connections, and small messages. Other replicas still read.
func TestReadersHaveLimits(t *testing.T) {
	n := newTenants(t)
	n.publish(11)
	seen := n.read()
	n.expect(seen, 11)
	registry, _ := n.connect("registry")
	requests, err := registry.SubscribeSync(eventlog.ProgressRequestSubject)
	if err != nil {
		t.Fatal(err)
	}
	if err := registry.Flush(); err != nil {
		t.Fatal(err)
	}

	thief, _ := n.connect("watchfanout")
	for range 100 {
		if _, err := thief.SubscribeSync("watershed.stored.>"); err != nil {
			t.Fatal(err)
		}
	}
	if err := thief.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := thief.LastError(); !errors.Is(err, nats.ErrMaxSubscriptionsExceeded) {
		t.Errorf("100 subscriptions: %v", err)
	}

	conf, err := n.ids("watchfanout").ClientConfig("nats")
	if err != nil {
		t.Fatal(err)
	}
	large, err := nats.Connect(n.url, nats.Secure(conf), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	defer large.Close()
	err = large.Publish(eventlog.ProgressRequestSubject, make([]byte, 1<<20))
	if err == nil {
		err = large.Flush()
	}
	if err == nil {
		t.Error("watchfanout may publish 1 MB")
	}
	if m, err := requests.NextMsg(200 * time.Millisecond); err == nil {
		t.Errorf("the publisher receives %d bytes", len(m.Data))
	}

	connected := 0
	for range 100 {
		nc, err := nats.Connect(n.url, nats.Secure(conf), nats.NoReconnect())
		if err != nil {
			continue
		}
		defer nc.Close()
		if nc.Flush() == nil {
			connected++
		}
	}
	if connected < 32 || connected > 64 {
		t.Errorf("watchfanout has %d connections", connected)
	}
	n.publish(12)
	n.expect(seen, 12)
}

// The registry may not create a consumer either, and may not use stream APIs that it never calls.
func TestRegistryPermissionsAreMinimal(t *testing.T) {
	n := newTenants(t)
	n.publish(11)
	registry, _ := n.connect("registry")
	needs := []string{"STREAM.CREATE.watershed", "STREAM.CREATE.other", "STREAM.UPDATE.watershed",
		"STREAM.INFO.watershed", "STREAM.MSG.GET.watershed", "DIRECT.GET.watershed",
		"CONSUMER.NAMES.watershed", "CONSUMER.DELETE.watershed.x"}
	const deletion = "STREAM.DELETE.watershed" // the other requests need the stream
	var all sync.WaitGroup
	for _, subject := range apis {
		switch {
		case subject == deletion:
		case slices.Contains(needs, subject):
			all.Go(func() { n.expectResponse(registry, subject) })
		default:
			all.Go(func() {
				if _, err := registry.Request("$JS.API."+subject, []byte("{}"), time.Second); err == nil {
					t.Errorf("%s is permitted", subject)
				}
			})
		}
	}
	all.Wait()
	n.expectResponse(registry, deletion)
}

// lossy is a client whose first deletions of a stream lose their responses.
type lossy struct {
	jetstream.JetStream
	losses int
	// deletes: the stream is deleted before a response is lost.
	deletes bool
}

func (l *lossy) DeleteStream(ctx context.Context, name string) error {
	if l.losses == 0 || l.deletes {
		if err := l.JetStream.DeleteStream(ctx, name); err != nil {
			return err
		}
	}
	if l.losses == 0 {
		return nil
	}
	l.losses--
	return context.DeadlineExceeded
}

// A deletion that loses its response may have deleted the log. NATS forbids the deletion only if the log outlives two.
func TestADeletionMayLoseItsResponse(t *testing.T) {
	n := newTenants(t)
	for _, test := range []struct {
		losses  int
		deletes bool
		want    error
	}{{1, true, nil}, {1, false, nil}, {2, false, eventlog.ErrNotDeleted}} {
		if _, err := n.log.Stream(t.Context(), n.js); err != nil {
			t.Fatal(err)
		}
		deleted, err := n.log.Delete(t.Context(), &lossy{n.js, test.losses, test.deletes})
		if deleted != (test.want == nil) || !errors.Is(err, test.want) {
			t.Errorf("%+v: deleted %v, %v", test, deleted, err)
		}
	}
}

// JetStream refuses a log that is larger than its limit. The error names the flag.
func TestALogLargerThanTheLimitOfNATS(t *testing.T) {
	ids := inner(t)
	log := eventlog.Options{
		URL:       natsServer(t, ids("nats")),
		Storage:   "memory",
		Replicas:  1,
		Retention: time.Minute,
		MaxBytes:  maxMemoryBytes + 1,
	}
	_, js := connectTo(t, &log, "registry", ids("registry"))
	_, err := log.Stream(t.Context(), js)
	const want = "NATS cannot reserve --log-max-bytes=1073741825 for --log-storage=memory: lower the value"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("the error is %v", err)
	}
}

// The alert CertificateExpires covers NATS, which has no metrics of its own.
func TestMonitorHasTheValidityOfTheCertificate(t *testing.T) {
	w := httptest.NewRecorder()
	(&NATS{ID: inner(t)("nats")}).monitorPages().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, name := range []string{"expiration", "not_before"} {
		want := "watershed_certificate_" + name + `_timestamp_seconds{file="`
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("/metrics has no %s: %s", want, w.Body)
		}
	}
}
