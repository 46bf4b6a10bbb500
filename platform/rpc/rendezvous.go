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

// Routed makes a call go to one of the two replicas that serve key, if the connection was dialled with ByKey. The two
// are chosen by rendezvous hashing (Thaler and Ravishankar, 1998): every caller chooses the same ones without asking,
// and when a replica comes or goes only what it serves moves.
func Routed(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, routeBy, key)
}

const rendezvousName = "watershed_rendezvous"

func init() {
	balancer.Register(base.NewBalancerBuilder(rendezvousName, rendezvous{}, base.Config{HealthCheck: true}))
}

type rendezvous struct{}

// Build implements base.PickerBuilder.
func (rendezvous) Build(info base.PickerBuildInfo) balancer.Picker {
	if len(info.ReadySCs) == 0 {
		return base.NewErrPicker(balancer.ErrNoSubConnAvailable)
	}
	p := &picker{}
	for sc, i := range info.ReadySCs {
		p.ready = append(p.ready, replica{i.Address.Addr, sc})
	}
	slices.SortFunc(p.ready, func(a, b replica) int { return cmp.Compare(a.address, b.address) })
	return p
}

type replica struct {
	address string
	conn    balancer.SubConn
}

type picker struct {
	ready []replica
	next  atomic.Uint64
	known sync.Map // key → []replica
}

// Pick implements balancer.Picker. Calls alternate between a key's replicas, which keeps both of them warm.
func (p *picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	n := p.next.Add(1)
	of := p.ready
	if md, ok := metadata.FromOutgoingContext(info.Ctx); ok {
		if key := md.Get(routeBy); len(key) > 0 {
			of = p.serving(key[0])
		}
	}
	return balancer.PickResult{SubConn: of[n%uint64(len(of))].conn}, nil
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
