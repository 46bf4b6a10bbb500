package rpc

import (
	"cmp"
	"context"
	"hash/fnv"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/metadata"
)

// hashKeyHeader is the metadata key of a call's hash key.
const hashKeyHeader = "watershed-hash-key"

// ReplicasPerKey is the number of replicas that serve a key. While the first is away, the second has the key's data in
// memory.
const ReplicasPerKey = 2

// WithHashKey sends a call to one of the two replicas that serve key. Clients choose them by rendezvous hashing
// (Thaler and Ravishankar, 1998), so all clients choose the same replicas without coordination. When a replica comes
// or goes, only its keys move.
func WithHashKey(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, hashKeyHeader, key)
}

// WithReassignment is WithHashKey for a long call. The balancer calls onReassign in a new goroutine when another
// replica should carry the call. Then the call's replica no longer serves key, or it has several long calls of key and
// another replica of key has none. The call continues, and the caller may start it again.
func WithReassignment(ctx context.Context, key string, onReassign func()) context.Context {
	return context.WithValue(WithHashKey(ctx, key), reassignmentKey{}, onReassign)
}

type reassignmentKey struct{}

// ReassignmentOf returns the callback that WithReassignment added to ctx, or nil. Tests of callers use it too.
func ReassignmentOf(ctx context.Context) func() {
	onReassign, _ := ctx.Value(reassignmentKey{}).(func())
	return onReassign
}

func init() { balancer.Register(rendezvousBuilder{}) }

type rendezvousBuilder struct{}

// Name implements balancer.Builder.
func (rendezvousBuilder) Name() string { return Balancer }

// Build implements balancer.Builder.
func (rendezvousBuilder) Build(cc balancer.ClientConn, o balancer.BuildOptions) balancer.Balancer {
	config := base.Config{HealthCheck: true}
	r := newRendezvous()
	return addressBalancer{base.NewBalancerBuilder(Balancer, r, config).Build(cc, o)}
}

// addressBalancer passes the addresses of endpoints to package base, which reads only addresses. gRPC's own xDS client
// sets only endpoints.
type addressBalancer struct{ balancer.Balancer }

// UpdateClientConnState implements balancer.Balancer.
func (b addressBalancer) UpdateClientConnState(s balancer.ClientConnState) error {
	if len(s.ResolverState.Addresses) == 0 {
		for _, e := range s.ResolverState.Endpoints {
			s.ResolverState.Addresses = append(s.ResolverState.Addresses, e.Addresses...)
		}
	}
	return b.Balancer.UpdateClientConnState(s)
}

// rendezvous holds the long calls of a connection and its current picker.
type rendezvous struct {
	mu        sync.Mutex
	current   *picker
	longCalls map[*longCall]struct{}
	// callsAt is the number of long calls by key and address.
	callsAt map[placement]int
}

type placement struct{ key, address string }

func newRendezvous() *rendezvous {
	return &rendezvous{longCalls: map[*longCall]struct{}{}, callsAt: map[placement]int{}}
}

// outstandingOf returns the outstanding calls of sc in the current picker, or an empty record if sc was not ready. The
// caller holds the lock.
func (r *rendezvous) outstandingOf(sc balancer.SubConn) *outstanding {
	if r.current != nil {
		for _, old := range r.current.ready {
			if old.conn == sc {
				return old.outstanding
			}
		}
	}
	return &outstanding{}
}

// longCall is a call of WithReassignment that has not ended.
type longCall struct {
	placement
	onReassign func()
}

// Build implements base.PickerBuilder.
func (r *rendezvous) Build(info base.PickerBuildInfo) balancer.Picker {
	if len(info.ReadySCs) == 0 {
		return base.NewErrPicker(balancer.ErrNoSubConnAvailable)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &picker{owner: r}
	for sc, i := range info.ReadySCs {
		p.ready = append(p.ready, replica{i.Address.Addr, sc, r.outstandingOf(sc)})
	}
	slices.SortFunc(p.ready, func(a, b replica) int { return cmp.Compare(a.address, b.address) })
	r.current = p
	for s := range r.longCalls {
		r.reassign(s)
	}
	r.balance()
	return p
}

// reassign starts a call's callback if the call's replica no longer serves its key. The caller holds the lock.
func (r *rendezvous) reassign(s *longCall) {
	if !slices.ContainsFunc(r.current.serving(s.key), func(r replica) bool { return r.address == s.address }) {
		r.end(s)
		go s.onReassign()
	}
}

// balance moves calls to replicas that have just come. It starts the callback of a call if another replica serves its
// key and has no call of the key, while this replica has several. The caller holds the lock.
func (r *rendezvous) balance() {
	moved := map[string]bool{}
	for s := range r.longCalls {
		if moved[s.key] || r.callsAt[s.placement] < 2 {
			continue
		}
		moved[s.key] = slices.ContainsFunc(r.current.serving(s.key), func(other replica) bool {
			return r.callsAt[placement{s.key, other.address}] == 0
		})
		if moved[s.key] {
			r.end(s)
			go s.onReassign()
		}
	}
}

// begin registers a long call until done is called.
func (r *rendezvous) begin(s *longCall) (done func(balancer.DoneInfo)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.longCalls[s] = struct{}{}
	r.callsAt[s.placement]++
	r.reassign(s) // replicas may have changed since the pick
	return func(balancer.DoneInfo) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.end(s)
	}
}

// end removes a long call, if it is still there. The caller holds the lock.
func (r *rendezvous) end(s *longCall) {
	if _, ok := r.longCalls[s]; !ok {
		return
	}
	delete(r.longCalls, s)
	if r.callsAt[s.placement]--; r.callsAt[s.placement] == 0 {
		delete(r.callsAt, s.placement)
	}
}

// fewestLongCalls returns the replicas among candidates with the fewest long calls of a key.
func (r *rendezvous) fewestLongCalls(key string, candidates []replica) []replica {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := func(c replica) int { return r.callsAt[placement{key, c.address}] }
	fewest := calls(slices.MinFunc(candidates, func(a, b replica) int { return cmp.Compare(calls(a), calls(b)) }))
	return slices.DeleteFunc(slices.Clone(candidates), func(c replica) bool { return calls(c) > fewest })
}

type replica struct {
	address string
	conn    balancer.SubConn
	*outstanding
}

type picker struct {
	owner    *rendezvous
	ready    []replica
	next     atomic.Uint64
	assigned sync.Map // key → []replica
}

// Pick implements balancer.Picker. It picks the replica with fewer outstanding calls. If the numbers are equal it
// alternates, which keeps the caches of both of a key's replicas warm. A long call (WithReassignment) goes to the
// replica with the fewest long calls of its key.
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	n := callStateOf(info.Ctx)
	if n != nil && n.slot != "" {
		return n.pick(n.preferred(p)), nil
	}
	candidates, key := p.ready, ""
	if md, ok := metadata.FromOutgoingContext(info.Ctx); ok {
		if keys := md.Get(hashKeyHeader); len(keys) > 0 {
			key = keys[0]
			candidates = p.serving(key)
		}
	}
	if onReassign := ReassignmentOf(info.Ctx); onReassign != nil {
		chosen := p.leastRequest(p.owner.fewestLongCalls(key, responsive(candidates)))
		return balancer.PickResult{
			SubConn: chosen.conn,
			Done:    p.owner.begin(&longCall{placement{key, chosen.address}, onReassign}),
		}, nil
	}
	chosen := p.leastRequest(candidates)
	if n != nil {
		return n.pick(chosen), nil
	}
	return balancer.PickResult{SubConn: chosen.conn}, nil
}

// responsive returns the responsive replicas, or all if none is responsive.
func responsive(candidates []replica) []replica {
	unresponsive := func(r replica) bool { return r.unresponsive() }
	if !slices.ContainsFunc(candidates, unresponsive) {
		return candidates
	}
	if some := slices.DeleteFunc(slices.Clone(candidates), unresponsive); len(some) > 0 {
		return some
	}
	return candidates
}

// leastRequest picks the replica with fewer outstanding calls among the next two responsive replicas. If all are
// unresponsive, it considers all.
func (p *picker) leastRequest(candidates []replica) replica {
	next := p.next.Add(1)
	candidates = responsive(candidates)
	n := uint64(len(candidates))
	first, second := &candidates[next%n], &candidates[(next+1)%n]
	if second.calls.Load() < first.calls.Load() {
		return *second
	}
	return *first
}

func (p *picker) serving(key string) []replica {
	if cached, ok := p.assigned.Load(key); ok {
		return cached.([]replica)
	}
	ranked := slices.Clone(p.ready)
	weight := func(r replica) uint64 {
		h := fnv.New64a()
		_, _ = h.Write([]byte(key))
		_, _ = h.Write([]byte{0})
		_, _ = h.Write([]byte(r.address))
		return mix(h.Sum64())
	}
	slices.SortFunc(ranked, func(a, b replica) int { return cmp.Compare(weight(b), weight(a)) })
	ranked = ranked[:min(len(ranked), ReplicasPerKey)]
	p.assigned.Store(key, ranked)
	return ranked
}

// mix spreads a hash over all bits (the finalizer of MurmurHash3), because addresses differ only in their last bytes.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
