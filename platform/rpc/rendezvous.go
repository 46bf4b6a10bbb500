package rpc

import (
	"cmp"
	"context"
	"hash/fnv"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/metadata"
)

// routeBy is the metadata that names what a call is about.
const routeBy = "watershed-route"

// replicasFor is how many replicas serve one key: while one is away the other has what it takes in memory.
const replicasFor = 2

// Routed makes a call go to one of the two replicas that serve key, if the connection was dialled with ByKey. The two
// are chosen by rendezvous hashing (Thaler and Ravishankar, 1998): every caller chooses the same ones without asking,
// and when a replica comes or goes only what it serves moves.
func Routed(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, routeBy, key)
}

// Staying is Routed for a call that lasts. Once key is served by other replicas and no more by the one that the call
// has come to, moved is called, in a goroutine of its own: the call goes on, and is the caller's to begin anew.
func Staying(ctx context.Context, key string, moved func()) context.Context {
	return context.WithValue(Routed(ctx, key), movedKey{}, moved)
}

type movedKey struct{}

// Preferring makes a call go to the same replica as others about key, while that one serves, if the connection was
// dialled with ByKey. It is a preference: any replica can serve the call, and this one is likely to have the object's
// last value in memory. It does not go with Staying.
func Preferring(ctx context.Context, key string) context.Context {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return context.WithValue(ctx, preferredKey{}, slots[h.Sum32()%uint32(len(slots))])
}

type preferredKey struct{}

// slots bound how many keys a picker remembers: there may be as many keys as objects.
var slots = func() (names [256]string) {
	for i := range names {
		names[i] = "\x00" + strconv.Itoa(i)
	}
	return names
}()

// MovedOf is what Staying was given for a call's context, or nil.
func MovedOf(ctx context.Context) func() {
	moved, _ := ctx.Value(movedKey{}).(func())
	return moved
}

const rendezvousName = "watershed_rendezvous"

func init() { balancer.Register(rendezvousBuilder{}) }

type rendezvousBuilder struct{}

// Name implements balancer.Builder.
func (rendezvousBuilder) Name() string { return rendezvousName }

// Build implements balancer.Builder.
func (rendezvousBuilder) Build(cc balancer.ClientConn, o balancer.BuildOptions) balancer.Balancer {
	config := base.Config{HealthCheck: true}
	return base.NewBalancerBuilder(rendezvousName, &rendezvous{open: map[*stay]struct{}{}}, config).Build(cc, o)
}

// rendezvous is the calls of one connection that last, and who serves now.
type rendezvous struct {
	mu   sync.Mutex
	now  *picker
	open map[*stay]struct{}
}

// pendingOf is a connection's, for as long as the picker before knew it.
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
	p := &picker{of: r}
	for sc, i := range info.ReadySCs {
		p.ready = append(p.ready, replica{i.Address.Addr, sc, r.pendingOf(sc)})
	}
	slices.SortFunc(p.ready, func(a, b replica) int { return cmp.Compare(a.address, b.address) })
	r.mu.Lock()
	defer r.mu.Unlock()
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

// pending is what a replica has to answer of what prefers it.
type pending struct {
	calls atomic.Int64
	// since is when it last answered, or was asked while it had nothing to answer, in nanoseconds since 1970.
	since atomic.Int64
}

// silentFor is how long a replica may have something to answer, and answer nothing, until what prefers it goes
// elsewhere: one that is frozen is noticed by its connection's keepalive much later.
const silentFor = time.Second

// crowded is how many calls a replica may have to answer of what prefers it before what comes next goes elsewhere, if
// there are fewer by half there (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016).
const crowded = 16

func (p *pending) silent() bool {
	return p.calls.Load() > 0 && time.Now().UnixNano()-p.since.Load() > int64(silentFor)
}

func (p *pending) begin() (done func(balancer.DoneInfo)) {
	if p.calls.Add(1) == 1 {
		p.since.Store(time.Now().UnixNano())
	}
	return func(balancer.DoneInfo) {
		p.since.Store(time.Now().UnixNano())
		p.calls.Add(-1)
	}
}

type picker struct {
	of    *rendezvous
	ready []replica
	next  atomic.Uint64
	known sync.Map // key → []replica
}

// Pick implements balancer.Picker. Calls alternate between a key's replicas, which keeps both of them warm.
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	if slot, ok := info.Ctx.Value(preferredKey{}).(string); ok {
		of := p.serving(slot)
		chosen, other := of[0], of[len(of)-1]
		if chosen.silent() || chosen.calls.Load() > crowded+2*other.calls.Load() {
			chosen = other
		}
		return balancer.PickResult{SubConn: chosen.conn, Done: chosen.begin()}, nil
	}
	n := p.next.Add(1)
	of, key := p.ready, ""
	if md, ok := metadata.FromOutgoingContext(info.Ctx); ok {
		if keys := md.Get(routeBy); len(keys) > 0 {
			key = keys[0]
			of = p.serving(key)
		}
	}
	chosen := of[n%uint64(len(of))]
	result := balancer.PickResult{SubConn: chosen.conn}
	if moved := MovedOf(info.Ctx); moved != nil {
		result.Done = p.of.begin(&stay{key, chosen.address, moved})
	}
	return result, nil
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
