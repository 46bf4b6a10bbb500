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

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
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

// Preferring makes a call go to the same replica as others about key, while that one serves and has not much more to
// answer than the next. It is a preference: any replica can serve the call, and this one is likely to have the object's
// last value in memory. It does not go with Staying.
func Preferring(ctx context.Context, key string) context.Context {
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return context.WithValue(ctx, preferredKey{}, &preference{slot: slots[h.Sum32()%uint32(len(slots))]})
}

// Noting makes it known which replica a call goes to, so that Hedged asks again only where that one answers nobody, and
// others pass it by. Calls that are no streams are noted by themselves.
func Noting(ctx context.Context) context.Context {
	return context.WithValue(ctx, preferredKey{}, &preference{})
}

type preferredKey struct{}

// preference is what a call prefers a replica by, or nothing, and the one that it went to.
type preference struct {
	slot string
	to   atomic.Pointer[pending]
}

// waits says whether a call is known to be with a replica that answers others meanwhile.
func waits(ctx context.Context) bool {
	p, ok := ctx.Value(preferredKey{}).(*preference)
	if !ok {
		return false
	}
	to := p.to.Load()
	return to != nil && !to.silent()
}

// noted has calls noted that are no streams: what a replica does not answer tells that it is frozen.
func noted(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption) error {
	if ctx.Value(preferredKey{}) == nil {
		ctx = Noting(ctx)
	}
	return invoke(ctx, method, req, reply, cc, opts...)
}

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
	r := &rendezvous{open: map[*stay]struct{}{}}
	return byAddress{base.NewBalancerBuilder(rendezvousName, r, config).Build(cc, o)}
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

// pending is what a replica has to answer: calls that are no streams, and others that are noted.
type pending struct {
	calls atomic.Int64
	// since is when it last answered, or was asked while it had nothing to answer, in nanoseconds since 1970.
	since atomic.Int64
	// avoided is until when it is taken for silent, though those have left whom it did not answer.
	avoided atomic.Int64
}

const (
	// silentFor is how long a replica may have something to answer, and answer nothing, until calls go elsewhere: one
	// that is frozen is noticed by its connection's keepalive much later.
	silentFor = time.Second
	// leftAfter is how long it may have answered nothing until who leaves without an answer makes others go elsewhere,
	// and avoidedFor after how long somebody tries again.
	leftAfter  = 300 * time.Millisecond
	avoidedFor = 5 * time.Second
)

func (p *pending) silent() bool {
	now := time.Now().UnixNano()
	return p.calls.Load() > 0 && now-p.since.Load() > int64(silentFor) || now < p.avoided.Load()
}

func (p *pending) begin() (done func(balancer.DoneInfo)) {
	if p.calls.Add(1) == 1 {
		p.since.Store(time.Now().UnixNano())
	}
	return p.end
}

func (p *pending) end(info balancer.DoneInfo) {
	now := time.Now()
	left := status.Code(info.Err) == codes.Canceled || status.Code(info.Err) == codes.DeadlineExceeded
	switch {
	case !left:
		p.since.Store(now.UnixNano())
		p.avoided.Store(0)
	case now.UnixNano()-p.since.Load() > int64(leftAfter):
		p.avoided.Store(now.Add(avoidedFor).UnixNano())
	}
	p.calls.Add(-1)
}

// crowded is how many calls a replica may have to answer of what prefers it before what comes next goes elsewhere, if
// there are fewer by half there (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2016).
const crowded = 16

type picker struct {
	of    *rendezvous
	ready []replica
	next  atomic.Uint64
	known sync.Map // key → []replica
}

// Pick implements balancer.Picker. Calls that go to any of a key's replicas alternate, which keeps both of them warm.
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	noted, _ := info.Ctx.Value(preferredKey{}).(*preference)
	if noted != nil && noted.slot != "" {
		of := p.serving(noted.slot)
		chosen, other := of[0], of[len(of)-1]
		if chosen.silent() || chosen.calls.Load() > crowded+2*other.calls.Load() {
			chosen = other
		}
		return noted.goesTo(chosen), nil
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
	if noted != nil {
		return noted.goesTo(chosen), nil
	}
	return balancer.PickResult{SubConn: chosen.conn}, nil
}

// turn is whichever of the next two replicas has less to answer, without those that are silent while there are others.
func (p *picker) turn(of []replica) replica {
	n := p.next.Add(1)
	var first *replica
	for i := range uint64(len(of)) {
		next := &of[(n+i)%uint64(len(of))]
		switch {
		case next.silent():
		case first == nil:
			first = next
		case next.calls.Load() < first.calls.Load():
			return *next
		default:
			return *first
		}
	}
	if first == nil {
		return of[n%uint64(len(of))]
	}
	return *first
}

// goesTo notes where a call goes.
func (p *preference) goesTo(r replica) balancer.PickResult {
	p.to.Store(r.pending)
	return balancer.PickResult{SubConn: r.conn, Done: r.begin()}
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
