package rpc

import "google.golang.org/grpc/resolver"

// builder implements Replicas. Connections to eds:///service receive x's endpoints.
func (x *XDS) builder() resolver.Builder { return xdsBuilder{x} }

type xdsBuilder struct{ *XDS }

// Scheme implements resolver.Builder. The scheme is not xds, because gRPC would then add metadata to each call
// (internal.GRPCResolverSchemeExtraMetadata): 4 allocations.
func (xdsBuilder) Scheme() string { return "eds" }

// Build implements resolver.Builder.
func (b xdsBuilder) Build(t resolver.Target, cc resolver.ClientConn,
	_ resolver.BuildOptions) (resolver.Resolver, error) {
	service := t.Endpoint()
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.services[service]
	if f == nil {
		f = &serviceState{addresses: b.readCache(service), watchers: map[resolver.ClientConn]bool{}}
		b.services[service] = f
	}
	f.watchers[cc] = true
	if len(f.addresses) > 0 { // without endpoints, calls wait
		_ = cc.UpdateState(stateOf(f.addresses))
	}
	select {
	case b.subscribed <- struct{}{}:
	default:
	}
	return &xdsResolver{b.XDS, service, cc}, nil
}

type xdsResolver struct {
	*XDS
	service string
	cc      resolver.ClientConn
}

// ResolveNow implements resolver.Resolver. It does nothing, because the server pushes changes.
func (*xdsResolver) ResolveNow(resolver.ResolveNowOptions) {}

// Close implements resolver.Resolver.
func (r *xdsResolver) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.services[r.service].watchers, r.cc)
}

func stateOf(addresses []string) resolver.State {
	var s resolver.State
	for _, a := range addresses {
		s.Addresses = append(s.Addresses, resolver.Address{Addr: a})
	}
	return s
}
