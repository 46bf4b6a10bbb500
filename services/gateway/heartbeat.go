package gateway

import (
	"context"
	"crypto/rand"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/watchable"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// heartbeatPeriod is how often a gateway calls registry. It is below the lifetimes of the gateway's leases in etcd.
	heartbeatPeriod = 10 * time.Second
	// heartbeatTimeout bounds a call.
	heartbeatTimeout = 3 * time.Second
	// heartbeatRetry is the pause after a failed call.
	heartbeatRetry = time.Second
	// maxEstablishing bounds the CRDs in a report. registry establishes further CRDs without the report, after 5 s.
	maxEstablishing = 200
)

// heartbeat reports to registry that the gateway is live, the address at which it accepts connections, and the CRDs
// that it serves before they are established.
//
//	live --accepting--> an endpoint of the kubernetes Service --draining--> live --> left
type heartbeat struct {
	registry registryv1.DiscoveryClient
	name     string
	// address is the gateway's IP address; empty if unknown.
	address string
	// accepting is closed when the gateway is ready for the first time, and draining when it shuts down.
	accepting, draining <-chan struct{}
	// process, if set, returns the encoder of a report of the gateway's process. It may take long, so no call waits for
	// it: a call encodes the newest report, with the time of the call, or has none.
	process func(context.Context) func() []byte
	newest  atomic.Pointer[func() []byte]
	// live is the number of live gateways; 0 until registry has counted this gateway.
	live watchable.Value[int]
	// establishing has the revisions of the CRDs that the gateway serves and that are not established, by name.
	establishing watchable.Value[map[string]int64]
}

func newHeartbeat(registry registryv1.DiscoveryClient, address string, accepting,
	draining <-chan struct{}) *heartbeat {
	return &heartbeat{registry: registry, name: rand.Text(), address: address, accepting: accepting, draining: draining}
}

// describe keeps the newest report until ctx is done.
func (h *heartbeat) describe(ctx context.Context) {
	tick := time.NewTicker(heartbeatPeriod)
	defer tick.Stop()
	for {
		reportCtx, cancel := context.WithTimeout(ctx, heartbeatPeriod)
		report := h.process(reportCtx)
		cancel()
		h.newest.Store(&report)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// run calls registry until ctx is done, and then leaves.
func (h *heartbeat) run(ctx context.Context) {
	if h.process != nil {
		go h.describe(ctx)
	}
	defer func() {
		leaveCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatTimeout)
		defer cancel()
		_, _ = h.registry.Gateways(leaveCtx,
			&registryv1.GatewaysRequest{Name: h.name, AdvertiseAddress: h.address, Leaving: true})
	}()
	accepting, draining, accepts, report := h.accepting, h.draining, false, false
	var beat <-chan time.Time
	for {
		establishing, changed := h.establishing.Get()
		// not canceled with ctx: registry would have stored that there is no address, and not have removed the endpoint
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatTimeout)
		r := &registryv1.GatewaysRequest{Name: h.name, AdvertiseAddress: h.address, Accepting: accepts,
			Establishing: establishing, Report: report}
		if newest := h.newest.Load(); newest != nil && *newest != nil && !report {
			r.Process = (*newest)()
		}
		resp, err := h.registry.Gateways(callCtx, r)
		cancel()
		switch {
		case err != nil:
			if ctx.Err() == nil {
				slog.Warn("Registry does not count this gateway", "error", err)
			}
			beat, changed = time.After(heartbeatRetry), nil
		case !report:
			live := max(1, int(resp.Alive))
			h.live.Update(func(before int) (int, bool) { return live, live != before })
			beat = time.After(heartbeatPeriod)
		}
		report = false
		select {
		case <-ctx.Done():
			return
		case <-accepting:
			accepts, accepting = true, nil
		case <-draining:
			accepts, draining, accepting = false, nil, nil
		case <-changed:
			report = true
		case <-beat:
		}
	}
}

// serves reports the CRDs of a view that are not established. If they are too many, it reports the newest.
func (h *heartbeat) serves(v *discovery.View) {
	establishing := map[string]int64{}
	for _, e := range v.Resources {
		if e.NotEstablished {
			establishing[e.Resource.Resource+"."+e.Resource.Group] = e.CrdRevision
		}
	}
	if extra := len(establishing) - maxEstablishing; extra > 0 {
		oldest := slices.Sorted(maps.Values(establishing))[extra]
		maps.DeleteFunc(establishing, func(_ string, revision int64) bool { return revision < oldest })
	}
	h.establishing.Update(func(before map[string]int64) (map[string]int64, bool) {
		return establishing, !maps.Equal(before, establishing)
	})
}

// counted reports whether registry has counted this gateway.
func (h *heartbeat) counted() bool {
	live, _ := h.live.Get()
	return live > 0
}
