package core

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"watershed.dev/platform/events"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// TestTranscripts runs the transcripts in testdata. Each is a world: a directive is a step, and its output is the
// decisions of the core. testdata/README.md lists the directives.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".txt") {
			return
		}
		s := &transcript{world: newWorld(), streams: map[string]*tierStream{}}
		s.gateway.choose = func() *replica { return s.replicas[0] }
		datadriven.RunTest(t, path, s.run)
	})
}

// transcript runs the directives of a file.
type transcript struct {
	*world
	streams map[string]*tierStream
	bucket  Bucket
	place   Watch
}

func (s *transcript) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	s.trace = &out
	name := ""
	if len(d.CmdArgs) > 0 {
		name = d.CmdArgs[0].Key
	}
	switch d.Cmd {
	case "setup": // the log has the input's events, and the replicas read them
		for line := range strings.Lines(d.Input) {
			s.etcdStep(t, d, strings.TrimSpace(line))
		}
		s.elect(s.publisher("one"))
		s.settle(s.publisher("one"))
		for _, a := range d.CmdArgs {
			s.replica(a.Key).catchUp(s.world)
		}
		s.publisher("one").reader.catchUp(s.world)
		out.Reset()
		s.tracef("the log is complete up to revision %d", s.publisher("one").core.Published)
	case "write": // the input's events reach the log, and the replicas
		for line := range strings.Lines(d.Input) {
			s.etcdStep(t, d, strings.TrimSpace(line))
		}
		s.trace = &strings.Builder{}
		s.settle(s.publisher("one"))
		for _, a := range d.CmdArgs {
			s.replica(a.Key).catchUp(s.world)
		}
	case "etcd":
		for line := range strings.Lines(d.Input) {
			s.etcdStep(t, d, strings.TrimSpace(line))
		}
	case "log":
		s.logStep(t, d, name)
	case "replica":
		d.MaybeScanArgs(t, "ring", &s.replica(name).limit)
	case "read", "live", "kill-replica", "restart-reader", "ring":
		s.replicaStep(t, d, s.replica(name))
	case "stream", "pump":
		s.streamStep(t, d, name)
	case "gateway", "frame", "reassign", "pump-next", "replace", "client", "step", "unblock", "writes", "state",
		"bookmark-now", "clock":
		s.gatewayStep(t, d, name)
	case "initial-watch", "sent":
		s.placeStep(t, d)
	case "bucket", "charge":
		s.bucketStep(t, d)
	default:
		s.publisherStep(t, d, s.publisher(name))
	}
	if s.err != nil {
		t.Errorf("%s: %v", d.Pos, s.err)
	}
	if out.Len() == 0 {
		return "ok\n"
	}
	return out.String()
}

// etcdStep runs a line of the directive etcd: writes of a transaction, compact or restore.
func (s *transcript) etcdStep(t *testing.T, d *datadriven.TestData, line string) {
	words := strings.Fields(line)
	switch words[0] {
	case "compact":
		s.compact(number(t, d, words[1]))
		return
	case "restore":
		s.restore(number(t, d, words[1]))
		return
	case "write": // of something that is no served resource
		s.commit()
		return
	case "delayed":
		x := s.etcd.delayed[0]
		s.etcd.delayed = s.etcd.delayed[1:]
		s.tracef("etcd: the delayed write of %s succeeds: %v", x.identity, s.writeEpoch(x))
		return
	}
	var writes []write
	for part := range strings.SplitSeq(line, ", ") {
		words := strings.Fields(part)
		resource, object, _ := strings.Cut(words[1], "/")
		x := write{resource: resourceOf(resource), name: object, bad: slices.Contains(words, "undecodable")}
		if words[0] == "delete" {
			x.kind = logv1.Type_TYPE_DELETED
		}
		writes = append(writes, x)
	}
	s.commit(writes...)
}

func number(t *testing.T, d *datadriven.TestData, s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return n
}

func (s *transcript) logStep(t *testing.T, d *datadriven.TestData, verb string) {
	n := 1
	d.MaybeScanArgs(t, "n", &n)
	switch verb {
	case "expire":
		s.expire(n)
	case "lose-end":
		s.loseEnd(n)
	case "recreate":
		s.recreate()
	case "corrupt":
		s.corrupt(uint64(n))
	default:
		for _, m := range s.log.stored {
			if m.corrupt {
				s.tracef("%d %s corrupt", m.Sequence, m.Id)
				continue
			}
			for _, e := range m.events {
				s.tracef("%d %s %s", m.Sequence, m.Id, describeEvent(e))
			}
		}
	}
}

func (s *transcript) publisherStep(t *testing.T, d *datadriven.TestData, p *publisher) {
	w := s.world
	switch d.Cmd {
	case "elect":
		s.elect(p)
	case "notice":
		p.notice(w)
	case "kill":
		p.crash(w)
	case "observe":
		p.reader.catchUp(w)
	case "begin":
		p.begin(w)
	case "request":
		var o outcome
		for _, a := range d.CmdArgs[1:] {
			o = map[string]outcome{
				"fails":         fails,
				"response-lost": loses,
				"delayed":       delays,
				"no-space":      noSpace,
			}[a.Key]
		}
		p.step(w, o)
	case "receive":
		p.receive(w)
	case "deliver":
		n, batch := 1, 1
		d.MaybeScanArgs(t, "n", &n)
		d.MaybeScanArgs(t, "batch", &batch)
		for f := s.flights[0]; n > 0; n-- {
			for i := len(s.flights) - 1; i >= 0; i-- { // the oldest flight first
				if s.flights[i].owner == p.name && len(s.flights[i].messages) > 0 {
					f = s.flights[i]
				}
			}
			f.deliver(w, batch)
		}
	case "lose-message":
		s.tracef("log: %v is lost on its way", p.flight.messages[0].ID)
		p.flight.messages = p.flight.messages[1:]
	case "acknowledge":
		p.acknowledge(w)
	case "rotate":
		p.rotate(w)
	case "check":
		e, _ := s.etcd.record()
		s.tracef("%s: reads etcd at revision %d: epoch %s", p.name, s.etcd.revision(), describeEpoch(e))
		p.term.Check(e, s.etcd.revision())
		p.watching(w)
	case "idle":
		p.term.ForceProgress()
		p.receive(w)
	case "publish":
		s.settle(p)
	case "failed":
		s.tracef("%s: a term failed at %v; must resign: %v", p.name, w.now.Sub(time.Unix(0, 0)), p.core.TermFailed(w.now))
	default:
		d.Fatalf(t, "unknown directive")
	}
}

// settle lets a publisher publish all of etcd's events.
func (s *transcript) settle(p *publisher) {
	for range 200 {
		switch {
		case p.term == nil:
			p.begin(s.world)
		case len(p.flight.messages) > 0:
			p.flight.deliver(s.world, 1)
		case len(p.flight.acks) > 0 || p.flight.rejected:
			p.acknowledge(s.world)
		case p.waits() && p.next > s.etcd.revision():
			return
		case p.waits():
			p.receive(s.world)
		default:
			p.step(s.world, succeeds)
		}
	}
}

func (s *transcript) replicaStep(t *testing.T, d *datadriven.TestData, r *replica) {
	switch d.Cmd {
	case "read":
		r.catchUp(s.world)
	case "live":
		var sequence int
		d.ScanArgs(t, "sequence", &sequence)
		_ = r.live(s.world, uint64(sequence))
	case "restart-reader":
		r.reader = Reader{}
		r.core.Restart()
	case "kill-replica":
		r.restart(s.world)
	case "ring":
		ring := &r.rings[resourceOf(d.CmdArgs[1].Key)]
		for _, e := range ring.All() {
			s.tracef("event %s", describePosition(e.position))
		}
		s.tracef("a watch can resume from revision %d", ring.Low.Revision)
	}
}

func position(t *testing.T, d *datadriven.TestData, key string) events.Position {
	var after, epoch string
	d.ScanArgs(t, key, &after)
	d.MaybeScanArgs(t, "epoch", &epoch)
	revision, index, inside := strings.Cut(after, ".")
	p := events.Position{Revision: number(t, d, revision), Index: events.LastIndex, Epoch: epoch}
	if inside {
		p.Index = int32(number(t, d, index))
	}
	return p
}

func (s *transcript) streamStep(t *testing.T, d *datadriven.TestData, name string) {
	if d.Cmd == "stream" {
		r := s.replica(d.CmdArgs[1].Key)
		s.streams[name] = r.watch(s.world, resourceOf(d.CmdArgs[2].Key), position(t, d, "after"))
		return
	}
	n := 100
	d.MaybeScanArgs(t, "n", &n)
	s.streams[name].bookmarkDue = d.HasArg("bookmark")
	s.streams[name].pump(s.world, n)
}

func (s *transcript) gatewayStep(t *testing.T, d *datadriven.TestData, name string) {
	w := s.world
	n := 100
	d.MaybeScanArgs(t, "n", &n)
	switch d.Cmd {
	case "gateway":
		if d.HasArg("replica") {
			var replica string
			d.ScanArgs(t, "replica", &replica)
			s.gateway.choose = func() *replica_ { return s.replica(replica) }
		}
		var entries int
		if d.MaybeScanArgs(t, "entries", &entries); entries > 0 {
			s.gateway.limit = entries * (EntryBytes + 4)
			s.gateway.retained = s.gateway.limit
		}
	case "frame":
		b := s.gateway.broadcasts[resourceOf(name)]
		b.stream.bookmarkDue = d.HasArg("bookmark")
		b.stream.pump(w, n)
		if len(b.stream.frames) == 0 {
			b.frame(w)
		}
		for b.stream != nil && len(b.stream.frames) > 0 && !b.stream.broken() {
			b.frame(w)
		}
	case "reassign":
		s.gateway.broadcasts[resourceOf(name)].reassign(w, s.replica(d.CmdArgs[1].Key))
	case "pump-next":
		s.gateway.broadcasts[resourceOf(name)].next.pump(w, n)
	case "replace":
		s.gateway.broadcasts[resourceOf(name)].replace(w)
	case "clock":
		var by string
		d.ScanArgs(t, "plus", &by)
		duration, err := time.ParseDuration(by)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		s.now = s.now.Add(duration)
	case "client":
		var revision int
		d.ScanArgs(t, "revision", &revision)
		s.open(name, resourceOf(d.CmdArgs[1].Key), int64(revision)).direct = !d.HasArg("http1")
		s.step(name, n)
	default:
		s.clientStep(t, d, s.clientOf(name), n)
	}
}

// replica_ is the type replica, for functions with a variable of that name.
type replica_ = replica

func (s *transcript) clientOf(name string) *client {
	i := slices.IndexFunc(s.gateway.clients, func(c *client) bool { return c.name == name })
	return s.gateway.clients[i]
}

// step lets a client continue: it opens a stream, forwards its frames, and joins a broadcast.
func (s *transcript) step(name string, n int) {
	c := s.clientOf(name)
	for range 5 {
		c.step(s.world)
		if c.own != nil {
			c.own.pump(s.world, n)
		}
	}
}

func (s *transcript) clientStep(t *testing.T, d *datadriven.TestData, c *client, n int) {
	switch d.Cmd {
	case "step":
		if c.own != nil {
			c.own.bookmarkDue = d.HasArg("bookmark")
		}
		s.step(c.name, n)
	case "unblock":
		c.unblock(s.world)
	case "bookmark-now":
		c.receiver.BookmarkNow()
	case "writes":
		var results []writeResult
		for _, a := range d.CmdArgs[1:] {
			results = append(results, map[string]writeResult{"accepted": accepted, "no-tokens": noTokens,
				"queue-full": queueFull, "window-full": windowFull}[a.Key])
		}
		c.result = func() writeResult { // the last result stays
			r := results[0]
			if len(results) > 1 {
				results = results[1:]
			}
			return r
		}
	case "state":
		switch {
		case c.ended():
			s.tracef("%s: ended: %s", c.name, c.end)
		case c.in != nil:
			state := [...]string{"active", "synced", "blocked"}[c.receiver.State]
			s.tracef("%s: %s, at position %s", c.name, state, describePosition(c.receiver.position))
		default:
			s.tracef("%s: unsynced, at position %s", c.name, describePosition(c.place.Position()))
		}
	}
}

// placeStep follows a watch's place while its own stream sends frames.
func (s *transcript) placeStep(t *testing.T, d *datadriven.TestData) {
	if d.Cmd == "initial-watch" {
		r := &watchfanoutv1.WatchRequest{Query: &watchfanoutv1.Query{}}
		d.ScanArgs(t, "resource-version", &r.ResourceVersion)
		if d.HasArg("table") {
			r.Query.Output = &registryv1.Output{As: &commonv1.Kind{Kind: "Table"}}
		}
		s.place = NewWatch(r, s.now)
	} else {
		m := &watchfanoutv1.WatchFrame{Position: position(t, d, "position").Proto(), ColumnsSent: d.HasArg("columns"),
			InitialEventsDone: d.HasArg("initial-events-done")}
		s.place.Sent(m)
	}
	s.tracef("initial events: %v; has every event up to its position: %v; may join a broadcast: %v; resumable: %v",
		s.place.WantsInitialEvents(), s.place.Positioned, s.place.MayJoin(), s.place.Resumable())
}

func (s *transcript) bucketStep(t *testing.T, d *datadriven.TestData) {
	if d.Cmd == "bucket" {
		var rate int
		d.ScanArgs(t, "rate", &rate)
		s.bucket = NewBucket(rate, s.now)
	} else {
		var events, bytes int
		d.MaybeScanArgs(t, "events", &events)
		d.MaybeScanArgs(t, "bytes", &bytes)
		s.bucket.Refill(s.now)
		s.bucket.Charge(EventCost(events, bytes))
	}
	state := fmt.Sprintf("full after %v", s.bucket.UntilFull())
	if s.bucket.Empty() {
		state = fmt.Sprintf("empty; a token after %v; ", s.bucket.UntilToken()) + state
	}
	s.tracef("%s", state)
}
