package publisher_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/publisher"
	"watershed.dev/services/registry/storage"
)

// journal records the log of a fixture's etcd, in a NATS server of the test, as a reader receives it.
type journal struct {
	*fixture.Fixture
	t    *testing.T
	log  *eventlog.Options
	nats *nats.Conn
	js   jetstream.JetStream

	mu       sync.Mutex
	recorded []string
	// sums are the newest sums, by resource, and progress the newest revision of a progress message.
	sums     map[string]uint64
	progress int64
	// items has the newest object of each resource and name.
	items   map[[2]string]*cache.Item
	changed chan struct{}
}

func init() { eventlog.CheckAppended = true }

// dataKeyPrefix is the prefix of the keys that encrypt events.
const dataKeyPrefix = "data-keys/"

// newJournal returns the journal of a fixture with flags.
func newJournal(t *testing.T, flags ...string) *journal {
	t.Helper()
	s, err := server.NewServer(&server.Options{JetStream: true, StoreDir: t.TempDir(), DontListen: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	j := &journal{Fixture: fixture.New(t, flags...), t: t, sums: map[string]uint64{}, changed: make(chan struct{}, 1),
		items: map[[2]string]*cache.Item{}}
	j.log = &eventlog.Options{Conn: s, Storage: "memory", Replicas: 1, Retention: time.Minute, MaxBytes: 1 << 26}
	if j.nats, err = j.log.Connect("registry", rpc.TLS{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.nats.Close)
	if j.js, err = jetstream.New(j.nats); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	dataKeys := storage.NewDataKeys(j.Resources.Storage, dataKeyPrefix, 0)
	dataKey := func(ctx context.Context, resource, key string) ([]byte, error) {
		st, _ := j.Resources.Storage.ByName(resource)
		return dataKeys.Get(ctx, st, key)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = eventlog.Main.Read(ctx, j.nats, eventlog.DirectGetReader{JS: j.js},
			eventlog.WithDecryption(ctx, dataKey, j.record))
	}()
	t.Cleanup(func() { cancel(); <-done })
	return j
}

// record appends an event of the log. Of progress it records the sums. It checks that no event follows the progress
// that includes it, and that each object has the revision of its event.
func (j *journal) record(e *logv1.Event) error {
	if e.Type == logv1.Type_TYPE_UNSPECIFIED {
		j.mu.Lock()
		maps.Copy(j.sums, e.Sums.GetChanges())
		j.progress = e.Revision
		j.mu.Unlock()
		j.notify()
		return nil
	}
	if e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" {
		j.progress = 0
	}
	if core.IsChange(e) && e.Revision <= j.progress {
		j.t.Errorf("%s of revision %d follows progress of revision %d", e.Name, e.Revision, j.progress)
	}
	for _, o := range []*logv1.Object{e.Object, e.Previous} {
		if o != nil && !strings.Contains(string(o.Json), fmt.Sprintf(`"resourceVersion":"%d"`, e.Revision)) {
			j.t.Errorf("%s %s of revision %d has the object %s", e.Type, e.Name, e.Revision, o.Json)
		}
	}
	s := strings.ToLower(strings.TrimPrefix(e.Type.String(), "TYPE_"))
	if e.StorageResource != "" {
		s += " " + e.StorageResource + "/" + e.Name
	}
	if e.Previous != nil {
		s += fmt.Sprintf(" was %v", e.Previous.Labels)
	}
	j.mu.Lock()
	j.recorded = append(j.recorded, s)
	if e.Object != nil {
		j.items[[2]string{e.StorageResource, e.Name}] = cache.EventOf(e).Item
	}
	j.mu.Unlock()
	j.notify()
	return nil
}

func (j *journal) notify() {
	select {
	case j.changed <- struct{}{}:
	default:
	}
}

// expect waits until the log has len(want) events, and compares them.
func (j *journal) expect(want ...string) {
	j.t.Helper()
	for deadline := time.After(2 * time.Minute); ; {
		j.mu.Lock()
		heard := slices.Clone(j.recorded)
		j.mu.Unlock()
		if len(heard) >= len(want) {
			if !slices.Equal(heard, want) {
				j.t.Fatalf("the log has %q, not %q", heard, want)
			}
			return
		}
		select {
		case <-j.changed:
		case <-deadline:
			j.t.Fatalf("the log has only %q", heard)
		}
	}
}

// observed waits until n registries respond with an observed end at the same event, which is of the ConfigMap.
// It asks again after a pause, because registries only respond.
func (j *journal) observed(n int, configMap string) {
	j.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		ends, err := eventlog.Main.ObservedEnds(j.t.Context(), j.nats)
		elsewhere := func(e core.LogEnd) bool {
			return e.Event != ends[0].Event || !strings.HasSuffix(e.Event.Key, "/configmaps/x/"+configMap)
		}
		if err == nil && len(ends) == n && !slices.ContainsFunc(ends, elsewhere) {
			return
		}
		if time.Now().After(deadline) {
			j.t.Fatalf("the registries' ends are %+v, %v", ends, err)
		}
	}
}

// newStoppedJournal returns a log that a publisher has begun and left: a reset, and the ConfigMap a.
func newStoppedJournal(t *testing.T) *journal {
	t.Helper()
	j := newJournal(t)
	stop := j.publish("one")
	j.expect("reset")
	j.write("create", "a", "")
	j.expect("reset", "added configmaps/a")
	stop()
	return j
}

// publish runs a publisher until the caller calls stop, which waits for its end.
func (j *journal) publish(identity string) (stop func()) { return j.run(j.publisher(identity)) }

func (j *journal) publisher(identity string) *publisher.Publisher {
	return &publisher.Publisher{
		Storage:            j.Resources.Storage,
		Etcd:               j.Resources.Storage.Etcd,
		Log:                j.log,
		NATS:               j.nats,
		JS:                 j.js,
		Identity:           identity,
		CompactionInterval: time.Hour,
	}
}

// run runs a publisher and the reader of its registry.
func (j *journal) run(p *publisher.Publisher) (stop func()) {
	ctx, cancel := context.WithCancel(j.t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	running.Go(func() {
		_ = eventlog.Main.Read(ctx, j.nats, eventlog.DirectGetReader{JS: j.js}, func(e *logv1.Event) error {
			p.Observe(e)
			return nil
		})
	})
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	j.t.Cleanup(stop)
	return stop
}

func (j *journal) write(verb, name, labels string) {
	j.t.Helper()
	r := &registryv1.WriteRequest{Verb: verb, Name: name}
	if verb == "create" {
		r.Name = ""
	}
	if verb != "delete" {
		r.Body = fmt.Appendf(
			nil,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"labels":{%s}}}`,
			name,
			labels,
		)
	}
	if _, err := j.Write(j.t.Context(), fixture.ConfigMaps, r, &fixture.Callbacks{}); err != nil {
		j.t.Fatal(err)
	}
}

// newEncryptedJournal returns a journal of a log whose publisher runs. etcd and the log encrypt config maps.
func newEncryptedJournal(t *testing.T) *journal {
	t.Helper()
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	const config = `{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration", "resources": [
{"resources": ["configmaps"], "providers": [{"aesgcm": {"keys": [
{"name": "k", "secret": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}]}}]}]}`
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	j := newJournal(t, "--encryption-provider-config="+file)
	p := j.publisher("one")
	p.DataKeys = storage.NewDataKeys(j.Resources.Storage, dataKeyPrefix, 0)
	j.run(p)
	j.expect("reset")
	return j
}

// item waits for an event of an object, and returns the object.
func (j *journal) item(resource, name string) *cache.Item {
	j.t.Helper()
	for deadline := time.After(2 * time.Minute); ; {
		j.mu.Lock()
		i := j.items[[2]string{resource, name}]
		j.mu.Unlock()
		if i != nil {
			return i
		}
		select {
		case <-j.changed:
		case <-deadline:
			j.t.Fatalf("the log has no event of %s/%s", resource, name)
		}
	}
}
