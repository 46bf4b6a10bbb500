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

// routeBy is the metadata that names what a call is about.
const routeBy = "watershed-route"

// replicasFor is how many replicas serve one key: while one is away the other has what it takes in memory.
const replicasFor = 2

// Routed makes a call go to one of the two replicas that serve key, which are chosen by rendezvous hashing (Thaler and
// Ravishankar, 1998): every caller chooses the same ones without asking, and when a replica comes or goes only what it
// serves moves.
func Routed(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, routeBy, key)
}

// Staying is Routed for a call that lasts. Once key is served by other replicas and no more by the one that the call
// has come to, moved is called, in a goroutine of its own: the call goes on, and is the caller's to begin anew.
func Staying(ctx context.Context, key string, moved func()) context.Context {
	return context.WithValue(Routed(ctx, key), movedKey{}, moved)
}

type movedKey struct{}

// MovedOf is what Staying was given for a call's context, or nil.
func MovedOf(ctx context.Context) func() {
	moved, _ := ctx.Value(movedKey{}).(func())
	return moved
}

func init() { balancer.Register(rendezvousBuilder{}) }

type rendezvousBuilder struct{}

// Name implements balancer.Builder.
func (rendezvousBuilder) Name() string { return Balancer }

// Build implements balancer.Builder.
func (rendezvousBuilder) Build(cc balancer.ClientConn, o balancer.BuildOptions) balancer.Balancer {
	config := base.Config{HealthCheck: true}
	r := &rendezvous{open: map[*stay]struct{}{}}
	return byAddress{base.NewBalancerBuilder(Balancer, r, config).Build(cc, o)}
}

// byAddress tells a balancer the addresses of endpoints: gRPC's own xDS client says nothing else, and base looks at
// addresses alone.
type byAddress struct{ balancer.Balancer }

// UpdateClientConnState implements balancer.Balancer.
func (b byAddress) UpdateClientConnState(s balancer.ClientConnState) error {
	if len(s.ResolverState.Addresses) == 0 {
		for _, e := range s.ResolverState.Endpoints {
			s.ResolverState.Addresses = append(s.ResolverState.Addresses, e.Addresses...)
		}
	}
	return b.Balancer.UpdateClientConnState(s)
}

// rendezvous is the calls of one connection that last, and who serves now.
type rendezvous struct {
	mu   sync.Mutex
	now  *picker
	open map[*stay]struct{}
}

// pendingOf is what a connection is known to have to answer; nothing, where it was not ready just before. The lock is
// held.
func (r *rendezvous) pendingOf(sc balancer.SubConn) *pending {
	if r.now != nil {
		for _, old := range r.now.ready {
			if old.conn == sc {
				return old.pending
			}
		}
	}
	return &pending{}
}

// stay is a call that lasts.
type stay struct {
	key, address string
	moved        func()
}

// Build implements base.PickerBuilder.
func (r *rendezvous) Build(info base.PickerBuildInfo) balancer.Picker {
	if len(info.ReadySCs) == 0 {
		return base.NewErrPicker(balancer.ErrNoSubConnAvailable)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &picker{of: r}
	for sc, i := range info.ReadySCs {
		p.ready = append(p.ready, replica{i.Address.Addr, sc, r.pendingOf(sc)})
	}
	slices.SortFunc(p.ready, func(a, b replica) int { return cmp.Compare(a.address, b.address) })
	r.now = p
	for s := range r.open {
		r.check(s)
	}
	return p
}

// check tells a call that its replica does not serve its key any more. The lock is held.
func (r *rendezvous) check(s *stay) {
	if !slices.ContainsFunc(r.now.serving(s.key), func(r replica) bool { return r.address == s.address }) {
		delete(r.open, s)
		go s.moved()
	}
}

// begin notes a call that lasts, until it is done.
func (r *rendezvous) begin(s *stay) (done func(balancer.DoneInfo)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[s] = struct{}{}
	r.check(s) // since it was picked replicas may have come and gone
	return func(balancer.DoneInfo) {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.open, s)
	}
}

type replica struct {
	address string
	conn    balancer.SubConn
	*pending
}

type picker struct {
	of    *rendezvous
	ready []replica
	next  atomic.Uint64
	known sync.Map // key → []replica
}

// Pick implements balancer.Picker. A call goes to the replica with less to answer, by turns where they have as much,
// which keeps both of a key's replicas warm.
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	n := noteOf(info.Ctx)
	if n != nil && n.slot != "" {
		return n.send(n.preferred(p)), nil
	}
	of, key := p.ready, ""
	if md, ok := metadata.FromOutgoingContext(info.Ctx); ok {
		if keys := md.Get(routeBy); len(keys) > 0 {
			key = keys[0]
			of = p.serving(key)
		}
	}
	chosen := p.turn(of)
	if moved := MovedOf(info.Ctx); moved != nil {
		return balancer.PickResult{SubConn: chosen.conn, Done: p.of.begin(&stay{key, chosen.address, moved})}, nil
	}
	if n != nil {
		return n.send(chosen), nil
	}
	return balancer.PickResult{SubConn: chosen.conn}, nil
}

// turn is of the next two replicas that are not silent the one with less to answer; of all of them, where all are
// silent.
func (p *picker) turn(of []replica) replica {
	at := p.next.Add(1)
	if slices.ContainsFunc(of, func(r replica) bool { return r.silent() }) {
		if answer := slices.DeleteFunc(slices.Clone(of), func(r replica) bool { return r.silent() }); len(answer) > 0 {
			of = answer
		}
	}
	n := uint64(len(of))
	first, second := &of[at%n], &of[(at+1)%n]
	if second.calls.Load() < first.calls.Load() {
		return *second
	}
	return *first
}

func (p *picker) serving(key string) []replica {
	if known, ok := p.known.Load(key); ok {
		return known.([]replica)
	}
	all := slices.Clone(p.ready)
	weight := func(r replica) uint64 {
		h := fnv.New64a()
		_, _ = h.Write([]byte(key))
		_, _ = h.Write([]byte{0})
		_, _ = h.Write([]byte(r.address))
		return mix(h.Sum64())
	}
	slices.SortFunc(all, func(a, b replica) int { return cmp.Compare(weight(b), weight(a)) })
	all = all[:min(len(all), replicasFor)]
	p.known.Store(key, all)
	return all
}

// mix spreads a hash over all bits (the finalizer of MurmurHash3): addresses differ in their last bytes alone.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
