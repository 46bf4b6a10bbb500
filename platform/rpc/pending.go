package rpc

import (
	"context"
	"hash/fnv"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
)

// Preferring makes a call go to the same replica as others about key, while that one serves and has not much more to
// answer than the next. It is a preference: any replica can serve the call, and this one is likely to have the object's
// last value in memory. Asked again (Hedged), the call goes to the next. It does not go with Staying.
func Preferring(ctx context.Context, key string) context.Context {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return context.WithValue(ctx, noteKey{}, &note{slot: slots[h.Sum32()%uint32(len(slots))]})
}

// Noting has it known which replica a call is with: Hedged asks again only where that one is silent.
func Noting(ctx context.Context) context.Context { return context.WithValue(ctx, noteKey{}, &note{}) }

// slots bound how many keys a picker remembers: there may be as many keys as objects.
var slots = func() (names [256]string) {
	for i := range names {
		names[i] = "\x00" + strconv.Itoa(i)
	}
	return names
}()

type noteKey struct{}

// note is what is known of a call.
type note struct {
	// slot is that of the key that a replica is preferred for; empty: any replica will do.
	slot string
	// with is the replica that the call went to last, or nil.
	with atomic.Pointer[pending]
	// unary calls count: that a replica answers none of them tells of the replica. A stream may take long, and wait for
	// its caller.
	unary atomic.Bool
}

func noteOf(ctx context.Context) *note {
	n, _ := ctx.Value(noteKey{}).(*note)
	return n
}

// noteUnary has every unary call count as what its replica has to answer.
func noteUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	n := noteOf(ctx)
	if n == nil {
		n = &note{}
		ctx = context.WithValue(ctx, noteKey{}, n)
	}
	n.unary.Store(true)
	return invoke(ctx, method, req, reply, cc, opts...)
}

// takesItsTime says whether a call is noted, and not with a replica that is silent: it is with one that answers others,
// in this process, or no replica is ready for it.
func takesItsTime(ctx context.Context) bool {
	n := noteOf(ctx)
	if n == nil {
		return false
	}
	with := n.with.Load()
	return with == nil || !with.silent()
}

// preferred is the replica that a call goes to, of the two that serve its key: the first, unless it is crowded; the
// other one, where the call is made again; and none that is silent while there is another.
func (n *note) preferred(p *picker) replica {
	of := p.serving(n.slot)
	first, second := of[0], of[len(of)-1]
	before := n.with.Load()
	if before == first.pending || before == nil && first.calls.Load() > crowded+2*second.calls.Load() {
		first, second = second, first
	}
	may := func(r replica) bool { return r.pending != before && !r.silent() }
	if may(first) {
		return first
	}
	if may(second) {
		return second
	}
	if third := p.turn(p.ready); may(third) {
		return third
	}
	return first
}

// crowded is how many more calls than twice what the second one has the first replica may have to answer until calls go
// to the second (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016).
const crowded = 16

// send has a call go to a replica.
func (n *note) send(to replica) balancer.PickResult {
	n.with.Store(to.pending)
	result := balancer.PickResult{SubConn: to.conn}
	if n.unary.Load() {
		result.Done = to.begin()
	}
	return result
}

// AskAgain is after how long without an answer a question is asked again that is noted: the first moment that its
// replica can be silent (Hedged).
const AskAgain = silentFor + 100*time.Millisecond

const (
	// silentFor is how long a replica may have something to answer, and answer nothing, until calls go elsewhere: one
	// that is frozen is noticed by its connection's keepalive much later.
	silentFor = time.Second
	// avoidedFor is how long calls go elsewhere after one was made again, since its replica was silent.
	avoidedFor = 5 * time.Second
)

// pending is what a replica has to answer of unary calls. Times are nanoseconds by clock.
type pending struct {
	calls atomic.Int64
	// since is when it last answered, or was asked while it had nothing to answer.
	since atomic.Int64
	// avoided is until when calls go elsewhere unless it answers before; 0: they do not.
	avoided atomic.Int64
}

// clock is a time that nobody sets.
func clock() int64 { return int64(time.Since(began)) }

var began = time.Now()

// silent says whether calls are to go elsewhere: it was asked, and has answered nothing for silentFor.
func (p *pending) silent() bool {
	now, avoided := clock(), p.avoided.Load()
	return p.calls.Load() > 0 && now-p.since.Load() > int64(silentFor) || avoided != 0 && now < avoided
}

// avoid has calls go elsewhere for a while, also once the one that is not answered has ended.
func (p *pending) avoid() { p.avoided.Store(clock() + int64(avoidedFor)) }

func (p *pending) begin() (done func(balancer.DoneInfo)) {
	if p.calls.Add(1) == 1 {
		p.since.Store(clock())
	}
	return p.end
}

func (p *pending) end(info balancer.DoneInfo) {
	if info.Err == nil || info.BytesReceived { // an error is an answer, if it is the replica's
		p.since.Store(clock())
		p.avoided.Store(0)
	}
	p.calls.Add(-1)
}
