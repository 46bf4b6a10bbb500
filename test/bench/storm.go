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

// storm measures the latency of writes, without and beside clients that list all pods. A first list loads the pods.
// The clients accept gzip, as client-go does. They discard the body, because their own CPU work would delay the writes.
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
	s.listAll(context.Background(), s.client)
	out := map[string]float64{}
	report := func(when string) {
		ctx, cancel := context.WithTimeout(context.Background(), beside)
		defer cancel()
		o := s.measured(ctx, writes)["writes"]
		out["writes, "+when+" a relist storm: p50 (ms)"] = percentile(o.took, 50)
		out["writes, "+when+" a relist storm: p99 (ms)"] = percentile(o.took, 99)
	}
	report("without")
	began := time.Now()
	stop := s.startRelistStorm()
	report("beside")
	took := time.Since(began)
	for metric, n := range stop() {
		out["a relist storm: "+metric+" a second"] = float64(n) / took.Seconds()
	}
	out["writes beside a relist storm: p99 as a multiple of without"] = out["writes, beside a relist storm: p99 (ms)"] /
		out["writes, without a relist storm: p99 (ms)"]
	return out
}

// startRelistStorm starts the clients' process.
func (s *server) startRelistStorm() (stop func() map[string]int64) {
	return startChild("relist-storm", s.url, s.kubeconfig)
}

// runRelistStorm is the process of stormClients clients of a server's URL, with a kubeconfig's user. Each has its own
// connection, and lists all pods once a second.
func runRelistStorm(ctx context.Context, args []string) (counters func() map[string]int64) {
	s := &server{url: args[0]}
	var listing sync.WaitGroup
	var lists atomic.Int64
	for range stormClients {
		client := clientOf(args[1], false)
		listing.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				if s.listAll(ctx, client) {
					lists.Add(1)
				}
			}
		})
	}
	return func() map[string]int64 { listing.Wait(); return map[string]int64{"lists answered": lists.Load()} }
}

// listAll lists all pods with gzip. It returns true if the response is compressed.
func (s *server) listAll(ctx context.Context, client *http.Client) bool {
	return s.packed(ctx, client, "/api/v1/pods", "application/json")
}
