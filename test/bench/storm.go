package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// stormClients is the number of clients of a storm.
	stormClients = 20
	// reconnects is the number of connections that a client of the reconnect storm opens at once.
	reconnects = 25
)

// storms has the work of each client, once a second, and the counter of successes. The clients list all pods, read them
// by a watch with initial events (client-go's informers since 1.35), or open connections as after a server's restart.
var storms = map[string]struct {
	do      func(*server, context.Context, *http.Client) bool
	counter string
}{
	"relist":     {(*server).listAll, "lists answered"},
	"watch-list": {(*server).watchListAll, "lists answered"},
	"reconnect":  {(*server).reconnect, fmt.Sprintf("times %d connections", reconnects)},
}

// storm measures the latency of writes, without and beside the clients of a storm. A first call loads the pods, if it
// reads them. The clients discard the body, because their own CPU work would delay the writes.
func storm(s *server, name string) map[string]float64 {
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
	if !storms[name].do(s, context.Background(), s.client) {
		log.Panicf("%s: a first %s fails", s.name, name)
	}
	out := map[string]float64{}
	report := func(when string) {
		ctx, cancel := context.WithTimeout(context.Background(), beside)
		defer cancel()
		o := s.measured(ctx, writes)["writes"]
		out[fmt.Sprintf("writes, %s a %s storm: p50 (ms)", when, name)] = percentile(o.took, 50)
		out[fmt.Sprintf("writes, %s a %s storm: p99 (ms)", when, name)] = percentile(o.took, 99)
	}
	report("without")
	began := time.Now()
	stop := s.startStorm(name)
	report("beside")
	took := time.Since(began)
	for metric, n := range stop() {
		out[fmt.Sprintf("a %s storm: %s a second", name, metric)] = float64(n) / took.Seconds()
	}
	p99 := func(when string) float64 { return out[fmt.Sprintf("writes, %s a %s storm: p99 (ms)", when, name)] }
	out[fmt.Sprintf("writes beside a %s storm: p99 as a multiple of without", name)] = p99("beside") / p99("without")
	return out
}

// startStorm starts the clients' process.
func (s *server) startStorm(name string) (stop func() map[string]int64) {
	return startChild("storm", s.url, s.kubeconfig, name)
}

// runStorm runs stormClients clients of a server's URL, with a kubeconfig's user. Each client has its own connection,
// and reads all pods once a second with a function of storms.
func runStorm(ctx context.Context, args []string) (counters func() map[string]int64) {
	s := &server{url: args[0]}
	var reading sync.WaitGroup
	var reads atomic.Int64
	load := storms[args[2]]
	for range stormClients {
		client := clientOf(args[1], false)
		reading.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				if load.do(s, ctx, client) {
					reads.Add(1)
				}
			}
		})
	}
	return func() map[string]int64 { reading.Wait(); return map[string]int64{load.counter: reads.Load()} }
}

// listAll lists all pods with gzip, as client-go does. It returns true if the response is compressed.
func (s *server) listAll(ctx context.Context, client *http.Client) bool {
	return s.packed(ctx, client, "/api/v1/pods", "application/json")
}

// reconnect opens connections at once, and sends a request over each. It returns true if all succeed.
func (s *server) reconnect(ctx context.Context, client *http.Client) bool {
	transport := client.Transport.(*http.Transport).Clone()
	transport.DisableKeepAlives = true // a connection for each request
	own := &http.Client{Transport: transport, Timeout: requestTimeout}
	var failed atomic.Bool
	var all sync.WaitGroup
	for range reconnects {
		all.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/version", nil)
			check(err)
			resp, err := own.Do(req)
			if err != nil || resp.StatusCode != http.StatusOK {
				failed.Store(true)
			}
			if err == nil {
				resp.Body.Close()
			}
		})
	}
	all.Wait()
	return !failed.Load()
}

// watchListAll reads all pods as a watch's initial events, and ends the watch. It returns true if all have arrived.
func (s *server) watchListAll(ctx context.Context, client *http.Client) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, err := s.openWatch(ctx, client, "/api/v1/pods?watch=true&sendInitialEvents=true&allowWatchBookmarks=true"+
		"&resourceVersionMatch=NotOlderThan&resourceVersion=", "")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return false
		}
		if bytes.HasPrefix(line, []byte(`{"type":"BOOKMARK"`)) &&
			bytes.Contains(line, []byte(metav1.InitialEventsAnnotationKey)) {
			return true
		}
	}
}
