package simulation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

func init() { eventlog.CheckAppended = true }

var (
	simulations = flag.Int("simulations", 100, "the number of simulations of TestSimulation")
	firstSeed   = flag.Uint64("seed", 0, "the first seed of TestSimulation")
	steps       = flag.Int("steps", 120, "the number of steps of a simulation")
)

// TestSimulation runs a publisher's writer, NATS, replicas and clients in virtual time (testing/synctest), with random
// writes and faults by seed. Each client receives each event of etcd once and in order, or is expired. Each list has
// etcd's objects. A seed determines the steps, but not the order of goroutines. After a failure, the test removes steps
// while the failure remains, and prints the rest. The histories in testdata run first: a printed failure becomes a file
// there, because a seed has other steps after a change of the actions.
//
// All simulations share a bubble of synctest, because the NATS client reuses its timers.
func TestSimulation(t *testing.T) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	ats.Register() // the goroutine of this clock of NATS must not belong to the bubble
	defer ats.Unregister()
	histories, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(histories) == 0 {
		t.Fatal(len(histories), "histories:", err)
	}
	synctest.Test(t, func(t *testing.T) {
		for _, file := range histories {
			if err := simulate(t, readSteps(t, file)); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
		}
		for seed := *firstSeed; seed < *firstSeed+uint64(*simulations); seed++ {
			all := randomSteps(seed, *steps)
			if err := simulate(t, all); err != nil {
				all, err = shortest(t, all, err)
				t.Fatalf("seed %d: %v\n%s", seed, err, strings.Join(describe(all), "\n"))
			}
		}
	})
}

// maxShortenings bounds the simulations of shortest.
const maxShortenings = 200

// shortest removes steps while a simulation of the others fails.
func shortest(t *testing.T, all []step, err error) ([]step, error) {
	tried := 0
	for size := len(all) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(all) && tried < maxShortenings; tried++ {
			fewer := slices.Delete(slices.Clone(all), at, at+size)
			if e := simulate(t, fewer); e != nil {
				all, err = fewer, e
			} else {
				at += size
			}
		}
	}
	return all, err
}

// step is a step of a simulation: after a pause, an action with a random number.
type step struct {
	pause  time.Duration
	action int
	n      uint64
}

func randomSteps(seed uint64, n int) []step {
	rng := rand.New(rand.NewPCG(seed, 0))
	weights := 0
	for _, a := range actions {
		weights += a.weight
	}
	steps := make([]step, n)
	for i := range steps {
		s := &steps[i]
		*s = step{pause: time.Duration(rng.IntN(3)) * time.Millisecond, n: rng.Uint64()}
		if rng.IntN(10) == 0 {
			s.pause = time.Duration(rng.IntN(4000)) * time.Millisecond
		}
		for w := rng.IntN(weights); w >= actions[s.action].weight; s.action++ {
			w -= actions[s.action].weight
		}
	}
	return steps
}

func describe(steps []step) (lines []string) {
	for _, s := range steps {
		lines = append(lines, fmt.Sprintf("after %v: %s (%d)", s.pause, actions[s.action].name, s.n))
	}
	return lines
}

// readSteps reads the output of describe. A line that begins with # is a comment.
func readSteps(t *testing.T, file string) (steps []step) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		pause, done, _ := strings.Cut(strings.TrimPrefix(line, "after "), ": ")
		name, number, _ := strings.Cut(strings.TrimSuffix(done, ")"), " (")
		s := step{action: slices.IndexFunc(actions, func(a action) bool { return a.name == name })}
		s.pause, err = time.ParseDuration(pause)
		n, nerr := strconv.ParseUint(number, 10, 64)
		if err = errors.Join(err, nerr); err != nil || s.action < 0 {
			t.Fatalf("%s: %q is no step: %v", file, line, err)
		}
		s.n = n
		steps = append(steps, s)
	}
	return steps
}

// action is a write or a fault of a simulation.
type action struct {
	name   string
	weight int
	do     func(s *simulation, n uint64)
}

var actions = []action{
	{"write", 60, func(s *simulation, n uint64) {
		writes := []write{{resource: watched, name: string(rune('a' + n%4)), deleted: n>>8%5 == 0}}
		if n>>16%6 == 0 {
			writes = append(writes, write{resource: watched, name: string(rune('e' + n%3))})
		}
		s.etcd.write(writes...)
	}},
	{"a write of another resource", 5, func(s *simulation, n uint64) {
		s.etcd.write(write{resource: "secrets", name: "s", deleted: n%2 == 0})
	}},
	{"another publisher is elected", 4, func(s *simulation, n uint64) {
		s.etcd.mu.Lock()
		defer s.etcd.mu.Unlock()
		s.etcd.leader = []string{"p", "q"}[n%2]
	}},
	{"a replica restarts", 3, func(s *simulation, n uint64) { s.replicas[n%2].restart() }},
	{"a replica reconnects to NATS", 4, func(s *simulation, n uint64) {
		_ = s.replicas[n%2].connection().ForceReconnect()
	}},
	{"the log loses its first messages", 3, func(s *simulation, n uint64) {
		s.onStream(func(ctx context.Context, stream jetstream.Stream) error {
			state := stream.CachedInfo().State
			return stream.Purge(ctx, jetstream.WithPurgeSequence(state.FirstSeq+n%max(state.Msgs, 1)))
		})
	}},
	{"the log loses a message", 3, func(s *simulation, n uint64) {
		s.onStream(func(ctx context.Context, stream jetstream.Stream) error {
			state := stream.CachedInfo().State
			return stream.DeleteMsg(ctx, state.FirstSeq+n%max(state.Msgs, 1))
		})
	}},
	{"the log's stream is deleted", 1, func(s *simulation, _ uint64) {
		s.onStream(func(ctx context.Context, _ jetstream.Stream) error {
			return s.nats.js.DeleteStream(ctx, eventlog.StreamName)
		})
	}},
	{"NATS restarts without its log", 1, func(s *simulation, n uint64) {
		s.nats.stop()
		time.Sleep(time.Duration(n%3000) * time.Millisecond)
		s.nats.run()
	}},
	{"a corrupt message", 2, func(s *simulation, n uint64) {
		if last, sequence, ok, err := eventlog.Main.Last(s.ctx, s.nats.js); err == nil && ok {
			m := &nats.Msg{Subject: eventlog.Subject(watched), Data: []byte{8, 1, 16, byte(n)}, Header: nats.Header{
				jetstream.MsgIDHeader: {fmt.Sprintf("%d.0.other%d-1", last.Revision, sequence)},
				"Watershed-Checksum":  {"0"},
			}}
			_, _ = s.nats.nc.RequestMsg(m, time.Second)
		}
	}},
	{"etcd is compacted", 3, func(s *simulation, n uint64) {
		s.etcd.mu.Lock()
		defer s.etcd.mu.Unlock()
		s.etcd.compacted = max(s.etcd.compacted, s.etcd.revisionLocked()-int64(n%6))
	}},
	{"etcd responds to no replica", 2, func(s *simulation, n uint64) {
		set := func(down bool) {
			s.etcd.mu.Lock()
			defer s.etcd.mu.Unlock()
			s.etcd.down = down
		}
		set(true)
		time.Sleep(time.Duration(n%6000) * time.Millisecond)
		set(false)
	}},
}

// watched is the resource that clients watch.
const watched = "configmaps"

// simulation is a publisher pair, NATS, two replicas and their clients.
type simulation struct {
	ctx      context.Context
	etcd     *etcd
	nats     *natsServer
	replicas []*replica
	mu       sync.Mutex
	err      error
}

// violated records the first violation of a rule.
func (s *simulation) violated(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = fmt.Errorf(format, args...)
	}
}

func (s *simulation) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *simulation) onStream(do func(context.Context, jetstream.Stream) error) {
	ctx, cancel := context.WithTimeout(s.ctx, time.Second)
	defer cancel()
	if stream, err := s.nats.js.Stream(ctx, eventlog.StreamName); err == nil {
		_ = do(ctx, stream)
	}
}

// simulate runs steps, ends all faults, and checks that each client is current. It returns the first violation.
func simulate(t *testing.T, all []step) error {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	s := &simulation{ctx: ctx, etcd: newEtcd(), nats: newNATS(t)}
	defer s.nats.end()
	s.etcd.leader = "p"
	for _, name := range []string{"p", "q"} {
		p := &publisher{identity: name, log: &s.nats.log, nc: s.nats.nc, js: s.nats.js, etcd: s.etcd}
		running.Go(func() { p.run(ctx) })
	}
	for range 2 {
		r := &replica{simulation: s}
		r.start()
		s.replicas = append(s.replicas, r)
	}
	clients := make([]*client, 6)
	for i := range clients {
		clients[i] = &client{simulation: s, number: i}
		running.Go(func() { clients[i].run(ctx) })
	}
	for _, x := range all {
		time.Sleep(x.pause)
		if actions[x.action].do(s, x.n); s.failed() != nil {
			break
		}
	}
	s.etcd.write(write{resource: watched, name: "last"})
	for range 120 {
		if time.Sleep(time.Second); s.failed() != nil || !slices.ContainsFunc(clients, (*client).behind) {
			break
		}
	}
	for _, c := range clients {
		if c.behind() {
			s.violated("client %d at %d has not received the last event after two minutes", c.number, c.at.revision)
		}
	}
	cancel()
	running.Wait()
	for _, r := range s.replicas {
		r.stop()
	}
	return s.failed()
}

// replica is a replica of the watch tier.
type replica struct {
	*simulation
	mu sync.Mutex
	process
}

// process is the process of a replica. lifetime is done when the process ends.
type process struct {
	lifetime context.Context
	reader   *logreader.Reader
	cache    *cache.Cache
	server   *watch.Server
	nc       *nats.Conn
	end      func()
}

func (r *replica) start() {
	nc, err := r.nats.log.Connect("watchfanout", rpc.TLS{})
	if err != nil {
		r.violated("%v", err)
		return
	}
	js, err := jetstream.New(nc)
	if err != nil {
		r.violated("%v", err)
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.ctx))
	tasks := &lifecycle.Supervisor{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lifetime, r.nc, r.cache = ctx, nc, cache.New(4_000, 0) // a small ring, so that watches read backfills
	differences := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "differences"}, []string{"resource"})
	r.reader = logreader.New(r.cache, nc, logreader.Source{
		Stream:   eventlog.DirectGetReader{JS: js},
		Revision: r.etcd.revision,
		Rows: func(ctx context.Context, resource string, add func(*registryv1.Row)) (int64, error) {
			revision, err := r.etcd.revision(ctx)
			if err != nil {
				return 0, err
			}
			for _, row := range r.etcd.rows(resource, revision) {
				add(row)
			}
			return revision, nil
		},
	}, &tasks.Ready, logreader.Config{StaleAfter: 4 * time.Second, Backfills: true, Differences: differences})
	r.reader.Run(ctx, tasks)
	r.server = watch.New(watch.Options{
		Objects:        objects{&watch.Cached{Cache: r.cache, LogReader: r.reader}},
		Cache:          r.cache,
		LogReader:      r.reader,
		Converter:      conversion.New(nil, r.cache, 0),
		ProgressPeriod: 2 * time.Second,
	})
	r.end = func() {
		cancel()
		nc.Close()
		tasks.Wait()
		if n := testutil.CollectAndCount(differences); n > 0 {
			r.violated("%d resources of a replica differ from the publisher's sums", n)
		}
	}
}

// stop ends the replica's process and the streams of its clients.
func (r *replica) stop() {
	p := r.serving()
	p.server.Drain()
	p.end()
}

func (r *replica) restart() {
	r.stop()
	r.start()
}

func (r *replica) connection() *nats.Conn { return r.serving().nc }

// serving returns the running process.
func (r *replica) serving() process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.process
}

// objects resolves every query as a query of ConfigMaps.
type objects struct{ *watch.Cached }

func (objects) Resolve(_ context.Context, q *watchfanoutv1.Query) (*query.Query, error) {
	kind := &commonv1.Kind{Version: "v1", Kind: "ConfigMap"}
	return query.New(&registryv1.APIResource{Resource: q.Resource, StorageResource: watched, Namespaced: true,
		Kind: kind, StoredKind: kind}, q)
}

// client lists and watches, and checks each response.
type client struct {
	*simulation
	number int
	mu     sync.Mutex
	// at is the position of the client: the last event, or the revision of its list.
	at struct {
		revision int64
		index    int32
	}
	listed, expired bool
	// initial: the client receives initial events, which are the keys and revisions of items.
	initial bool
	items   []string
}

// behind returns whether the client lacks an event of etcd.
func (c *client) behind() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, more := c.next()
	return more || !c.listed
}

// next returns the next event of etcd. The caller holds mu.
func (c *client) next() (storedChange, bool) {
	for _, e := range c.etcd.changes(watched, c.at.revision-1) {
		if e.revision > c.at.revision || e.index > c.at.index {
			return e, true
		}
	}
	return storedChange{}, false
}

func (c *client) run(ctx context.Context) {
	for n := c.number; ctx.Err() == nil && c.failed() == nil; n++ {
		if n%3 == 0 { // with initial events instead of a list
			c.mu.Lock()
			c.initial, c.items, c.expired = true, nil, false
			c.mu.Unlock()
			c.watch(ctx, n)
		} else if c.list(ctx, c.replicas[n%2]) {
			c.watch(ctx, n)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// list reads the objects at etcd's revision, and compares them with etcd's.
func (c *client) list(ctx context.Context, r *replica) bool {
	p := r.serving()
	least := c.etcd.state(core.EtcdEvent{}).Revision
	if p.reader.CheckFresh() != nil || p.reader.WaitUntilConsistent(ctx) != nil {
		return false
	}
	s, err := p.reader.Snapshot(ctx, p.cache.Resource(watched), "")
	if err != nil {
		return false
	}
	if s.Revision < least {
		c.violated("a list of revision %d began when etcd was at %d", s.Revision, least)
	}
	var items []string
	for i := range s.Items() {
		items = append(items, fmt.Sprintf("%s@%d", i.Key, i.Revision))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.received(s.Revision, items)
	c.initial, c.expired = false, false
	return true
}

// received compares all objects at a revision with etcd's. The caller holds mu.
func (c *client) received(revision int64, items []string) {
	if now := c.etcd.state(core.EtcdEvent{}).Revision; revision > now {
		c.violated("a list of revision %d, and etcd is at %d", revision, now)
		return
	}
	var want []string
	for _, row := range c.etcd.rows(watched, revision) {
		want = append(want, fmt.Sprintf("x/%s@%d", row.Name, row.Revision))
	}
	if !slices.Equal(items, want) {
		c.violated("a list of revision %d has %v, not %v", revision, items, want)
	}
	c.at.revision, c.at.index, c.listed = revision, 1<<30, true
}

// watch watches from the list's revision until the watch expires. A stream that breaks resumes at the other replica.
func (c *client) watch(ctx context.Context, n int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	request := &watchfanoutv1.WatchRequest{
		Query: &watchfanoutv1.Query{Resource: &commonv1.Resource{Version: "v1", Resource: watched},
			Namespace: "x", Output: &registryv1.Output{MediaType: "application/json"}},
		ResourceVersion: strconv.FormatInt(c.at.revision, 10),
		AllowBookmarks:  true,
	}
	if c.initial {
		yes := true
		request.ResourceVersion, request.SendInitialEvents = "", &yes
	}
	place := core.NewWatch(request, time.Now())
	for ; ctx.Err() == nil && !c.expired && c.failed() == nil; n++ {
		p := c.replicas[n%2].serving()
		streamCtx, end := context.WithCancel(ctx)
		context.AfterFunc(p.lifetime, end)
		_ = p.server.Watch(request, &stream{ctx: streamCtx, client: c, place: &place})
		if end(); c.isInitial() {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (c *client) isInitial() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.initial
}

// stream is the client's end of a watch stream.
type stream struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx    context.Context
	client *client
	place  *core.Watch
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) SendMsg(m any) error { // a large frame is not part of the simulation
	return errors.New("unexpected message")
}

func (s *stream) Send(m *watchfanoutv1.WatchFrame) error {
	for line := range bytes.Lines(append(bytes.Join(m.Initial, nil), m.Data...)) {
		var e struct {
			Type   string
			Object struct {
				Code     int
				Metadata struct{ Name, ResourceVersion string }
			}
		}
		if err := json.Unmarshal(line, &e); err != nil {
			s.client.violated("%v: %s", err, line)
			return err
		}
		revision, _ := strconv.ParseInt(e.Object.Metadata.ResourceVersion, 10, 64)
		s.client.receive(e.Type, e.Object.Metadata.Name, revision)
	}
	s.place.Sent(m)
	if m.End {
		s.client.mu.Lock()
		s.client.expired = true
		s.client.mu.Unlock()
	}
	return nil
}

// receive checks an event of the client's watch.
func (c *client) receive(kind, name string, revision int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	want, more := c.next()
	switch {
	case kind == "ERROR":
	case c.initial && kind == "BOOKMARK":
		c.initial = false
		c.received(revision, c.items)
	case c.initial:
		c.items = append(c.items, fmt.Sprintf("x/%s@%d", name, revision))
	case kind == "BOOKMARK":
		if more && want.revision <= revision || revision < c.at.revision {
			c.violated("client %d at %d receives a bookmark of %d; the next event is %v", c.number, c.at.revision, revision,
				want)
		}
		c.at.revision, c.at.index = revision, 1<<30
	case !more || "TYPE_"+kind != want.kind().String() || name != want.name || revision != want.revision:
		c.violated("client %d at %d receives %s %s of %d; the next event is %v", c.number, c.at.revision, kind, name,
			revision, want)
	default:
		c.at.revision, c.at.index = want.revision, want.index
	}
}
