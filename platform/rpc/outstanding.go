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

// WithAffinity sends a call to the same replica as other calls with key, unless that replica is away or overloaded. It
// is a preference, because every replica can serve the call. The preferred replica probably has the object's last
// value in memory. A hedged call (Hedged) goes to the key's second replica. Do not combine it with WithReassignment.
func WithAffinity(ctx context.Context, key string) context.Context {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return context.WithValue(ctx, callStateKey{}, &callState{slot: affinitySlots[h.Sum32()%uint32(len(affinitySlots))]})
}

// AffinityOf returns the slot of the key that WithAffinity added to ctx, or "". Equal slots prefer the same replica.
// Tests of callers use it.
func AffinityOf(ctx context.Context) string {
	if n := callStateOf(ctx); n != nil {
		return n.slot
	}
	return ""
}

// TrackReplica records the replica of a call, so that Hedged calls again only if the replica is unresponsive.
func TrackReplica(ctx context.Context) context.Context {
	return context.WithValue(ctx, callStateKey{}, &callState{})
}

// affinitySlots bound the number of keys that a picker caches, because there may be as many keys as objects.
var affinitySlots = func() (names [256]string) {
	for i := range names {
		names[i] = "\x00" + strconv.Itoa(i)
	}
	return names
}()

type callStateKey struct{}

// callState is the state of a call in the balancer.
type callState struct {
	// slot is the slot of the affinity key. Empty: the call has no affinity.
	slot string
	// replica is the last replica that the call was sent to, or nil.
	replica atomic.Pointer[outstanding]
	// unary is set for a unary call. Only unary calls are counted as outstanding: a stream may be long, and may wait
	// for its caller.
	unary atomic.Bool
	// maxWait bounds each wait of a unary call for a ready replica; 0: no bound. wait is the timer of that bound.
	maxWait time.Duration
	wait    *time.Timer
}

func callStateOf(ctx context.Context) *callState {
	n, _ := ctx.Value(callStateKey{}).(*callState)
	return n
}

// trackUnary counts every unary call as an outstanding call of its replica. It bounds the wait for a ready replica if
// WithMaxWait has set a bound.
func trackUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	n := callStateOf(ctx)
	if n == nil {
		n = &callState{}
		ctx = context.WithValue(ctx, callStateKey{}, n)
	}
	n.unary.Store(true)
	if n.maxWait == 0 {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	ctx, end := n.boundWait(ctx, method)
	return end(invoke(ctx, method, req, reply, cc, opts...))
}

// isResponsive reports if a call is tracked and its replica is not unresponsive. A call without a replica is
// responsive: it runs in this process, or no replica is ready.
func isResponsive(ctx context.Context) bool {
	n := callStateOf(ctx)
	if n == nil {
		return false
	}
	replica := n.replica.Load()
	return replica == nil || !replica.unresponsive()
}

// preferred picks one of the key's two replicas: the first, unless it is overloaded. A retry goes to the second. It
// skips unresponsive replicas, and both if they are overloaded, while a third is responsive.
func (n *callState) preferred(p *picker) replica {
	candidates := p.serving(n.slot)
	first, second := candidates[0], candidates[len(candidates)-1]
	previous := n.replica.Load()
	if previous == first.outstanding || previous == nil && first.calls.Load() > overloaded+2*second.calls.Load() {
		first, second = second, first
	}
	usable := func(r replica) bool { return r.outstanding != previous && !r.unresponsive() }
	if usable(first) {
		if first.calls.Load() > overloaded && second.calls.Load() > overloaded {
			third := p.leastRequest(p.ready)
			if usable(third) && first.calls.Load() > overloaded+2*third.calls.Load() {
				return third
			}
		}
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

// overloaded bounds the outstanding calls of the first replica, beyond twice the number of the second. Further calls
// go to the second (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016).
const overloaded = 16

// pick assigns a call to a replica.
func (n *callState) pick(to replica) balancer.PickResult {
	n.replica.Store(to.outstanding)
	result := balancer.PickResult{SubConn: to.conn}
	if n.unary.Load() {
		result.Done = to.begin()
	}
	if n.wait != nil {
		result.Done = n.atReplica(result.Done)
	}
	return result
}

// HedgeDelay is the delay of Hedged for tracked calls: the first moment at which the replica can be unresponsive.
const HedgeDelay = unresponsiveAfter + 100*time.Millisecond

const (
	// unresponsiveAfter is how long a replica may have outstanding calls without a response before new calls go to
	// other replicas. The keepalive of its connection detects a frozen replica much later.
	unresponsiveAfter = time.Second
	// ejectionTime is how long new calls avoid a replica after a call was hedged because the replica was unresponsive.
	ejectionTime = 5 * time.Second
)

// outstanding counts the unary calls that wait for a replica's response. Times are nanoseconds of monotonic. New calls
// prefer responsive replicas.
//
//	responsive    --outstanding calls, no response for unresponsiveAfter--> unresponsive
//	unresponsive  --a response, or no outstanding calls-------------------> responsive
//
//	any state     --a hedged call-----------------------------------------> ejected
//	ejected       --a response, or ejectionTime---------------------------> responsive
//
// After ejectionTime a replica that still has not responded to its outstanding calls is unresponsive.
type outstanding struct {
	calls atomic.Int64
	// since is the time of the last response, or of a call that began when none was outstanding.
	since atomic.Int64
	// ejectedUntil is the end of the ejection, unless the replica responds earlier; 0: not ejected.
	ejectedUntil atomic.Int64
}

// monotonic returns a time that does not change when the clock is set.
func monotonic() int64 { return int64(time.Since(processStart)) }

var processStart = time.Now()

// unresponsive reports if new calls should go to other replicas. Either the replica has outstanding calls and no
// response for unresponsiveAfter, or it is ejected.
func (p *outstanding) unresponsive() bool {
	now, ejectedUntil := monotonic(), p.ejectedUntil.Load()
	return p.calls.Load() > 0 && now-p.since.Load() > int64(unresponsiveAfter) ||
		ejectedUntil != 0 && now < ejectedUntil
}

// eject sends new calls to other replicas for ejectionTime, even if the unanswered call ends.
func (p *outstanding) eject() { p.ejectedUntil.Store(monotonic() + int64(ejectionTime)) }

func (p *outstanding) begin() (done func(balancer.DoneInfo)) {
	if p.calls.Add(1) == 1 {
		p.since.Store(monotonic())
	}
	return p.end
}

func (p *outstanding) end(info balancer.DoneInfo) {
	if info.Err == nil || info.BytesReceived { // a replica's error is a response too
		p.since.Store(monotonic())
		p.ejectedUntil.Store(0)
	}
	p.calls.Add(-1)
}
