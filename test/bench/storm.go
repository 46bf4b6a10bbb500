package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// stormClients is the number of clients that list all pods every second, like informers with failing watches.
const stormClients = 20

// storm measures the latency of writes, without and beside clients that list all pods. These clients accept gzip, as
// client-go does. They discard the body, because their own CPU work would delay the writes.
func storm(s *server) map[string]float64 {
	writes := map[string]other{"writes": {
		every: 20 * time.Millisecond,
		ask: func(ctx context.Context, i int) (*http.Response, error) {
			path := fmt.Sprintf("%s/apis/coordination.k8s.io/v1/namespaces/bench/leases/l%d", s.url, i%16)
			req, err := http.NewRequestWithContext(ctx, http.MethodPatch, path, strings.NewReader(
				fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(renewTime))))
			check(err)
			req.Header.Set("Content-Type", "application/merge-patch+json")
			return s.client.Do(req)
		},
	}}
	out := map[string]float64{}
	report := func(when string) {
		ctx, cancel := context.WithTimeout(context.Background(), beside)
		defer cancel()
		o := s.measured(ctx, writes)["writes"]
		out["writes, "+when+" a relist storm: p50 (ms)"] = percentile(o.took, 50)
		out["writes, "+when+" a relist storm: p99 (ms)"] = percentile(o.took, 99)
	}
	report("without")
	ctx, cancel := context.WithCancel(context.Background())
	began := time.Now()
	lists := s.listAll(ctx)
	report("beside")
	cancel()
	out["a relist storm: lists answered a second"] = float64(lists()) / time.Since(began).Seconds()
	out["writes beside a relist storm: p99 as a multiple of without"] = out["writes, beside a relist storm: p99 (ms)"] /
		out["writes, without a relist storm: p99 (ms)"]
	return out
}

// listAll lists all pods with stormClients clients, each once a second, until ctx ends. The returned function waits for
// them, and returns the number of lists.
func (s *server) listAll(ctx context.Context) (wait func() int64) {
	var listing sync.WaitGroup
	var lists atomic.Int64
	for range stormClients {
		listing.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for ctx.Err() == nil {
				select {
				case <-tick.C:
				case <-ctx.Done():
				}
				if s.packed(ctx, "/api/v1/pods", "application/json") {
					lists.Add(1)
				}
			}
		})
	}
	return func() int64 { listing.Wait(); return lists.Load() }
}
