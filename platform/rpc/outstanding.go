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

// WithAffinity makes a call go to the same replica as others about key, while that one serves and has not much more to
// answer than the next. It is a preference: any replica can serve the call, and this one is likely to have the object's
// last value in memory. Asked again (Hedged), the call goes to the next. It does not go with Staying.
func WithAffinity(ctx context.Context, key string) context.Context {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return context.WithValue(ctx, callStateKey{}, &callState{slot: affinitySlots[h.Sum32()%uint32(len(affinitySlots))]})
}

// TrackReplica has it known which replica a call is with: Hedged asks again only where that one is silent.
func TrackReplica(ctx context.Context) context.Context {
	return context.WithValue(ctx, callStateKey{}, &callState{})
}

// affinitySlots bound how many keys a picker remembers: there may be as many keys as objects.
var affinitySlots = func() (names [256]string) {
	for i := range names {
		names[i] = "\x00" + strconv.Itoa(i)
	}
	return names
}()

type callStateKey struct{}

// callState is what is known of a call.
type callState struct {
	// slot is that of the key that a replica is preferred for; empty: any replica will do.
	slot string
	// replica is the replica that the call went to last, or nil.
	replica atomic.Pointer[outstanding]
	// unary calls count: that a replica answers none of them tells of the replica. A stream may take long, and wait for
	// its caller.
	unary atomic.Bool
}

func callStateOf(ctx context.Context) *callState {
	n, _ := ctx.Value(callStateKey{}).(*callState)
	return n
}

// trackUnary has every unary call count as what its replica has to answer.
func trackUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	n := callStateOf(ctx)
	if n == nil {
		n = &callState{}
		ctx = context.WithValue(ctx, callStateKey{}, n)
	}
	n.unary.Store(true)
	return invoke(ctx, method, req, reply, cc, opts...)
}

// isResponsive says whether a call is noted, and not with a replica that is silent: it is with one that answers others,
// in this process, or no replica is ready for it.
func isResponsive(ctx context.Context) bool {
	n := callStateOf(ctx)
	if n == nil {
		return false
	}
	replica := n.replica.Load()
	return replica == nil || !replica.unresponsive()
}

// preferred is the replica that a call goes to, of the two that serve its key: the first, unless it is crowded; the
// other one, where the call is made again; and none that is silent while there is another.
func (n *callState) preferred(p *picker) replica {
	candidates := p.serving(n.slot)
	first, second := candidates[0], candidates[len(candidates)-1]
	previous := n.replica.Load()
	if previous == first.outstanding || previous == nil && first.calls.Load() > overloaded+2*second.calls.Load() {
		first, second = second, first
	}
	usable := func(r replica) bool { return r.outstanding != previous && !r.unresponsive() }
	if usable(first) {
		return first
	}
	if usable(second) {
		return second
	}
	if third := p.leastRequest(p.ready); usable(third) {
		return third
	}
	return first
}

// overloaded is how many more calls than twice what the second one has the first replica may have to answer until calls go
// to the second (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016).
const overloaded = 16

// pick has a call go to a replica.
func (n *callState) pick(to replica) balancer.PickResult {
	n.replica.Store(to.outstanding)
	result := balancer.PickResult{SubConn: to.conn}
	if n.unary.Load() {
		result.Done = to.begin()
	}
	return result
}

// HedgeDelay is after how long without an answer a question is asked again that is noted: the first moment that its
// replica can be silent (Hedged).
const HedgeDelay = unresponsiveAfter + 100*time.Millisecond

const (
	// unresponsiveAfter is how long a replica may have something to answer, and answer nothing, until calls go elsewhere: one
	// that is frozen is noticed by its connection's keepalive much later.
	unresponsiveAfter = time.Second
	// ejectionTime is how long calls go elsewhere after one was made again, since its replica was silent.
	ejectionTime = 5 * time.Second
)

// outstanding is what a replica has to answer of unary calls. Times are nanoseconds by clock.
type outstanding struct {
	calls atomic.Int64
	// since is when it last answered, or was asked while it had nothing to answer.
	since atomic.Int64
	// ejectedUntil is until when calls go elsewhere unless it answers before; 0: they do not.
	ejectedUntil atomic.Int64
}

// monotonic is a time that nobody sets.
func monotonic() int64 { return int64(time.Since(processStart)) }

var processStart = time.Now()

// unresponsive says whether calls are to go elsewhere: it was asked, and has answered nothing for unresponsiveAfter.
func (p *outstanding) unresponsive() bool {
	now, ejectedUntil := monotonic(), p.ejectedUntil.Load()
	return p.calls.Load() > 0 && now-p.since.Load() > int64(unresponsiveAfter) ||
		ejectedUntil != 0 && now < ejectedUntil
}

// eject has calls go elsewhere for a while, also once the one that is not answered has ended.
func (p *outstanding) eject() { p.ejectedUntil.Store(monotonic() + int64(ejectionTime)) }

func (p *outstanding) begin() (done func(balancer.DoneInfo)) {
	if p.calls.Add(1) == 1 {
		p.since.Store(monotonic())
	}
	return p.end
}

func (p *outstanding) end(info balancer.DoneInfo) {
	if info.Err == nil || info.BytesReceived { // an error is an answer, if it is the replica's
		p.since.Store(monotonic())
		p.ejectedUntil.Store(0)
	}
	p.calls.Add(-1)
}
