// Package publisher turns etcd's events into the event log. One publisher at a time, elected through etcd, holds the
// only watch that etcd serves; it decodes each event once, encodes it once for each media type, and publishes it with
// the id of the message before, so that a publisher that lost its election without noticing can do no harm.
package publisher

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/storage"
)

// ElectionKey is where publishers elect, outside of what kube-apiserver stores.
const ElectionKey = "/watershed/publisher"

// idleProgress is how often progress is published when nothing happens: well within the log's retention, so that the
// log's last message always says where to go on.
const idleProgress = 30 * time.Second

var (
	published  = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "watershed_publisher_events_total", Help: "Events published to the log, by stored resource."}, []string{"resource"})
	resetCount = prometheus.NewCounter(prometheus.CounterOpts{Name: "watershed_publisher_resets_total", Help: "Times the log had to start anew: etcd had compacted what came next, or was of another history, or the log was empty."})
	refused    = prometheus.NewCounter(prometheus.CounterOpts{Name: "watershed_publisher_refused_total", Help: "Events that could not be decoded, or are too large for a message: readers are told to read the resource anew."})
)

var (
	brokeOff = prometheus.NewCounter(prometheus.CounterOpts{Name: "watershed_publisher_broke_off_total", Help: "Times that publishing broke off, because of NATS or etcd, and went on from the log's last message."})
	reached  = prometheus.NewGauge(prometheus.GaugeOpts{Name: "watershed_publisher_revision", Help: "The revision up to which the log has everything, on the registry that publishes."})
	leading  = prometheus.NewGauge(prometheus.GaugeOpts{Name: "watershed_publisher_leading", Help: "1 on the registry that publishes."})
)

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{published, resetCount, refused, brokeOff, reached, leading}
}

// Publisher publishes while it is told to.
type Publisher struct {
	Storage  *storage.Storage
	Log      *eventlog.Options
	NATS     *nats.Conn
	JS       jetstream.JetStream
	Identity string
	// CompactionInterval is how long etcd keeps old revisions; 0: somebody else compacts.
	CompactionInterval time.Duration

	// customs knows how custom resources are read at the revision that is being published.
	customs *customresources.Follower
	// published is the revision that the log has come to; acknowledged counts the messages that it has taken.
	published, acknowledged atomic.Int64
}

// Run takes part in the election and publishes when elected, until ctx ends.
func (p *Publisher) Run(ctx context.Context) error {
	return Elect(ctx, p.Storage.Client.Client, ElectionKey, p.Identity, p.lead)
}

// resignAfter is for how long a leader may fail to publish before it lets another try, which may reach what it cannot.
const resignAfter = 8 * time.Second

func (p *Publisher) lead(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if p.CompactionInterval > 0 {
		go func() {
			defer rpc.Recover("compaction")
			p.compact(ctx)
		}()
	}
	leading.Set(1)
	defer leading.Set(0)
	var failing time.Time // since when nothing has been published
	for {
		before := p.acknowledged.Load()
		err := p.publish(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		brokeOff.Inc()
		slog.Warn("Publishing broke off; going on from the log's last message", "error", err)
		if failing.IsZero() || p.acknowledged.Load() != before {
			failing = time.Now()
		} else if time.Since(failing) > resignAfter {
			return fmt.Errorf("nothing could be published for %v: %w", time.Since(failing).Round(time.Second), err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// publish resumes from the log's last message and follows etcd until something breaks.
func (p *Publisher) publish(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := p.open(ctx)
	if err != nil {
		return err
	}
	asked := make(chan struct{}, 1)
	sub, err := p.NATS.Subscribe(eventlog.AskProgress, func(*nats.Msg) {
		select {
		case asked <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()

	from := c.last.Revision + 1
	if !c.last.Mark {
		from = c.last.Revision // its transaction may hold more
	}
	if p.customs, err = customresources.Follow(ctx, p.Storage, from-1); errors.Is(err, rpctypes.ErrCompacted) {
		return p.reset(ctx, c)
	} else if err != nil {
		return err
	}
	watchCtx := clientv3.WithRequireLeader(ctx)
	watch := p.Storage.Client.Watch(watchCtx, p.Storage.Prefix(), clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithRev(from), clientv3.WithProgressNotify(), clientv3.WithFragment())
	idle, marks, checks := time.NewTicker(idleProgress), time.NewTicker(markPeriod), time.NewTicker(markCheck)
	defer idle.Stop()
	defer marks.Stop()
	defer checks.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-c.failed:
			return err
		case <-asked:
			if err := p.Storage.Client.RequestProgress(watchCtx); err != nil {
				return err
			}
		case <-checks.C:
			if err := p.timed(ctx, c, p.unmarked); err != nil {
				return err
			}
		case <-marks.C:
			if err := p.timed(ctx, c, p.mark); err != nil {
				return err
			}
		case <-idle.C:
			if err := p.Storage.Client.RequestProgress(watchCtx); err != nil {
				return err
			}
			c.forced = true
		case resp, ok := <-watch:
			if !ok {
				return errors.New("etcd ended the watch")
			}
			if resp.CompactRevision != 0 {
				return p.reset(ctx, c)
			}
			if err := resp.Err(); err != nil {
				return err
			}
			if err := p.follow(ctx, c, resp); errors.Is(err, errUnknownPast) {
				return p.reset(ctx, c)
			} else if err != nil {
				return err
			}
		}
	}
}

// timed bounds what is asked of etcd and NATS between two events.
func (p *Publisher) timed(ctx context.Context, c *chain, what func(context.Context, *chain) error) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return what(ctx, c)
}

// follow publishes one answer of the watch.
func (p *Publisher) follow(ctx context.Context, c *chain, resp clientv3.WatchResponse) error {
	if resp.IsProgressNotify() {
		return c.progress(resp.Header.Revision)
	}
	for events := resp.Events; len(events) > 0; {
		n := 1
		for n < len(events) && events[n].Kv.ModRevision == events[0].Kv.ModRevision {
			n++
		}
		if err := p.transaction(ctx, c, events[:n]); err != nil {
			return err
		}
		events = events[n:]
		c.whole = true
	}
	return nil
}

// transaction is what one revision of etcd says.
type transaction struct {
	revision int64
	// size is how many events etcd has of it, out those that are published and resets what is told beside them.
	size        int
	out, resets []*logv1.Event
}

// reset adds the reset of a resource, for event i. Its place is past all events, by the event that it is for: the same
// whoever publishes the transaction, and from wherever in it.
func (t *transaction) reset(i int, storedAs string, redefined bool) {
	index := t.size + 2*i
	if redefined {
		index++
	}
	t.resets = append(t.resets, &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: t.revision, StoredAs: storedAs, Redefined: redefined, Index: int32(index)})
}

// refuse resets a resource for event i, which cannot be published.
func (t *transaction) refuse(i int, storedAs, key string, err error) {
	refused.Inc()
	slog.Error("An event cannot be published; its resource is to be read anew", "key", key, "revision", t.revision, "error", err)
	t.reset(i, storedAs, false)
}

// transaction publishes the events of one revision: readers apply them together. What is wrong with one of them is the
// matter of its resource, which readers are told to read anew; an error here is one of NATS, of etcd, or of the past.
func (p *Publisher) transaction(ctx context.Context, c *chain, events []*clientv3.Event) error {
	t := &transaction{revision: events[0].Kv.ModRevision, size: len(events)}
	for i, e := range events {
		event, redefined, err := p.event(ctx, e)
		if errors.Is(err, errUnknownPast) {
			return err
		}
		if redefined != "" {
			t.reset(i, redefined, true)
		}
		if st, ok := p.storedAt(string(e.Kv.Key)); err != nil && ok {
			t.refuse(i, st.Name(), string(e.Kv.Key), err)
		}
		if err == nil && event != nil {
			event.Index = int32(i)
			t.out = append(t.out, event)
		}
	}
	return t.publish(ctx, c)
}

// publish sends what the log does not have yet: it may end amid the transaction.
func (t *transaction) publish(ctx context.Context, c *chain) error {
	for n, event := range t.out {
		event.More = n < len(t.out)-1 || len(t.resets) > 0 // what is to be forgotten is forgotten with the rest's appearing
		var bad *unsendable
		if err := one(ctx, c, event); errors.As(err, &bad) {
			t.refuse(int(event.Index), event.StoredAs, event.Namespace+"/"+event.Name, bad)
		} else if err != nil {
			return err
		}
	}
	slices.SortFunc(t.resets, func(a, b *logv1.Event) int { return cmp.Compare(a.Index, b.Index) })
	for n, event := range t.resets {
		event.More = n < len(t.resets)-1
		if c.has(event) {
			continue
		}
		if err := c.send(event); err != nil {
			return err
		}
	}
	return nil
}

// one publishes one event, unless the log has it. What cannot be a message is *unsendable, also where the log has what
// comes after it.
func one(ctx context.Context, c *chain, event *logv1.Event) error {
	if c.has(event) {
		_, err := c.message(event)
		return err
	}
	span, traced := telemetry.BeginEvent(ctx, event.StoredAs, event.Revision)
	defer span.End()
	event.Trace = traced
	if err := c.send(event); err != nil {
		return err
	}
	published.WithLabelValues(event.StoredAs).Inc()
	return nil
}

// unsendable is an event that can be no message: nothing was asked of NATS.
type unsendable struct{ error }

// stallWait is how long a publish waits for room among those that are not acknowledged yet: a NATS that stalls for less
// is no reason to begin anew.
const stallWait = 5 * time.Second

// headroom is what a message's headers may take.
const headroom = 4 << 10

// errUnknownPast says that etcd has compacted what an object was before: who watched it with a selector cannot be told
// whether it left. The log starts anew.
var errUnknownPast = errors.New("etcd compacted the object's last state")

// storedAt finds whose etcd key it is.
func (p *Publisher) storedAt(key string) (*storage.Stored, bool) {
	if st, ok := p.Storage.ByKey(key); ok {
		return st, true
	}
	return p.customs.ByKey(key, p.Storage.Prefix())
}

// event decodes one etcd event; nil for a key of nothing served. redefined is the stored resource whose objects are
// read in another way after it, since it is its definition's.
func (p *Publisher) event(ctx context.Context, e *clientv3.Event) (out *logv1.Event, redefined string, err error) {
	key := string(e.Kv.Key)
	st, ok := p.storedAt(key)
	if !ok {
		return nil, "", nil
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("reading %q panicked: %v", key, r)
		}
	}()
	out, obj, err := p.read(ctx, e, st)
	if err == nil && customresources.Defines(st) {
		redefined = p.customs.Changed(obj, e.Type == mvccpb.DELETE)
	}
	return out, redefined, err
}

func (p *Publisher) read(ctx context.Context, e *clientv3.Event, st *storage.Stored) (*logv1.Event, runtime.Object, error) {
	key := string(e.Kv.Key)
	out := &logv1.Event{Revision: e.Kv.ModRevision, StoredAs: st.Name(), ObservedUnixNano: time.Now().UnixNano()}
	value := e.Kv.Value
	switch {
	case e.Type == mvccpb.DELETE:
		out.Type = logv1.Type_TYPE_DELETED
		if e.PrevKv == nil {
			return nil, nil, errUnknownPast
		}
		value = e.PrevKv.Value // its last state, at the revision of the deletion
	case e.IsCreate():
		out.Type = logv1.Type_TYPE_ADDED
	default:
		out.Type = logv1.Type_TYPE_MODIFIED
		if e.PrevKv == nil {
			return nil, nil, errUnknownPast
		}
	}
	obj, err := st.Decode(ctx, key, value, e.Kv.ModRevision)
	if err != nil {
		return nil, nil, err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, nil, err
	}
	out.Namespace, out.Name = m.GetNamespace(), m.GetName()
	if out.Object, err = st.Encode(obj); err != nil {
		return nil, nil, err
	}
	if out.Type != logv1.Type_TYPE_MODIFIED {
		return out, obj, nil
	}
	old, err := st.Decode(ctx, key, e.PrevKv.Value, e.Kv.ModRevision)
	if err != nil {
		return nil, nil, err
	}
	changed, err := st.Changed(old, out.Object)
	if err == nil && changed {
		out.Previous, err = st.Encode(old)
	}
	return out, obj, err
}

// reset starts the log anew at etcd's current revision, and says so in the log.
func (p *Publisher) reset(ctx context.Context, c *chain) error {
	resp, err := p.Storage.Client.Client.Get(ctx, ElectionKey)
	if err != nil {
		return err
	}
	resetCount.Inc()
	slog.Warn("The event log starts anew", "revision", resp.Header.Revision, "last", c.last.String())
	if err := c.send(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: resp.Header.Revision}); err != nil {
		return err
	}
	flushing, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.flush(flushing); err != nil {
		return err
	}
	return errors.New("the log was reset")
}

// open reads where the log ends. An empty one is begun with a reset, and so is one of another history of etcd.
func (p *Publisher) open(ctx context.Context) (*chain, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := p.Log.Stream(ctx, p.JS)
	if err != nil {
		return nil, err
	}
	last, sequence, ok, err := eventlog.Last(ctx, stream)
	if err != nil {
		return nil, err
	}
	c := &chain{
		js:           p.JS,
		max:          p.NATS.MaxPayload() - headroom,
		acknowledged: &p.acknowledged,
		stored:       &p.published,
		last:         last,
		failed:       make(chan error, 1),
		nonce:        rand.Text()[:8] + "-",
	}
	h, written, revision, err := readHistory(ctx, p.Storage.Client.Client)
	if err != nil {
		return nil, err
	}
	if ok {
		reason, err := p.continues(ctx, stream, last, h, revision)
		if err != nil {
			return nil, err
		}
		if reason == "" && h.ID != "" {
			c.history, c.marker = h, h.Mark
			// It is written again as it is: whatever an earlier leadership has still under way is void.
			c.written, err = p.writeHistory(ctx, h, written)
			return c, err
		}
		slog.Warn("The event log begins anew: it is of another history of etcd", "reason", reason)
	}
	p.published.Store(0)
	c.history = history{ID: rand.Text(), Mark: rand.Text()}
	c.marker = c.history.Mark
	if c.written, err = p.writeHistory(ctx, c.history, written); err != nil {
		return nil, err
	}
	c.expectSequence, c.begin = sequence, true
	resetCount.Inc()
	if err := c.send(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: c.written}); err != nil {
		return nil, err
	}
	return c, c.flush(ctx)
}

// compact removes revisions that are older than the interval. Only the leader does.
func (p *Publisher) compact(ctx context.Context) {
	tick := time.NewTicker(p.CompactionInterval)
	defer tick.Stop()
	var before int64
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		resp, err := p.Storage.Client.Client.Get(ctx, ElectionKey)
		if err != nil {
			continue
		}
		if before = min(before, p.published.Load()); before > 0 { // never what is not in the log yet
			if _, err := p.Storage.Client.Compact(ctx, before); err != nil {
				slog.Warn("Compaction failed", "revision", before, "error", err)
			}
		}
		before = resp.Header.Revision
	}
}

// chain publishes messages, each expecting the one before.
type chain struct {
	js    jetstream.JetStream
	last  eventlog.ID
	nonce string
	sent  int
	// history is what etcd says at HistoryKey, as this publisher wrote it; marker and nextMarker are what the log says of
	// it.
	history            history
	written            int64 // the revision at which etcd has it
	marker, nextMarker string
	// whole: a transaction has been published to its end since the log was opened.
	whole bool
	// begin: the next message is the first that expects no id but a sequence.
	begin          bool
	expectSequence uint64
	// forced: the next progress is published though nothing is new.
	forced bool
	failed chan error
	// newest is what becomes of the last message that was sent.
	newest *settlement
	// max is how large a message may be.
	max int64
	// acknowledged counts the log's messages, and stored is the revision of the newest message that the log has
	// acknowledged.
	acknowledged, stored *atomic.Int64
}

// settlement is what became of a message. err may be read once done is closed.
type settlement struct {
	done chan struct{}
	err  error
}

// has says whether the log has an event already: it ended amid the event's transaction when this publisher began.
func (c *chain) has(e *logv1.Event) bool {
	return !c.last.Mark && e.Revision == c.last.Revision && e.Index <= c.last.Index
}

// message is e as the log holds it. An error is an *unsendable.
func (c *chain) message(e *logv1.Event) (*nats.Msg, error) {
	e.History = c.history.ID
	if e.StoredAs == "" {
		e.Marker, e.NextMarker = c.marker, c.nextMarker
	}
	m, err := eventlog.Message(e)
	if err == nil && int64(len(m.Data)) > c.max {
		err = fmt.Errorf("it takes %d bytes, more than NATS takes in one message", len(m.Data))
	}
	if err != nil {
		return nil, &unsendable{err}
	}
	return m, nil
}

func (c *chain) send(e *logv1.Event) error {
	m, err := c.message(e)
	if err != nil {
		return err
	}
	c.sent++
	id := eventlog.IDOf(e, c.nonce+strconv.Itoa(c.sent))
	opts := []jetstream.PublishOpt{jetstream.WithMsgID(id.String()), jetstream.WithStallWait(stallWait)}
	if c.begin {
		opts, c.begin = append(opts, jetstream.WithExpectLastSequence(c.expectSequence)), false
	} else {
		opts = append(opts, jetstream.WithExpectLastMsgID(c.last.String()))
	}
	ack, err := c.js.PublishMsgAsync(m, opts...)
	if err != nil {
		return err
	}
	c.last = id
	settled := new(settlement)
	settled.done = make(chan struct{})
	c.newest = settled
	go func() {
		defer close(settled.done)
		select {
		case <-ack.Ok(): // and so are all before it: each is refused without the one before
			c.acknowledged.Add(1)
			for was := c.stored.Load(); was < id.Revision && !c.stored.CompareAndSwap(was, id.Revision); was = c.stored.Load() {
			}
			reached.Set(float64(c.stored.Load()))
		case err := <-ack.Err():
			settled.err = fmt.Errorf("publish %s: %w", id, err)
			select {
			case c.failed <- settled.err:
			default:
			}
		}
	}()
	return nil
}

// flush waits until all that was sent is in the log: the last message is refused without those before it.
func (c *chain) flush(ctx context.Context) error {
	if c.newest == nil {
		return nil
	}
	select {
	case <-c.newest.done:
		return c.newest.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// progress says that everything up to revision is in the log.
func (c *chain) progress(revision int64) error {
	if revision <= c.last.Revision && !c.forced {
		return nil
	}
	c.forced = false
	return c.send(&logv1.Event{Revision: max(revision, c.last.Revision)})
}
