package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// deliver measures the delivery of events to many watches. It returns CPU per delivery, the age of events on arrival,
// and memory per watch.
func deliver(s *server, watchers, rate, updates int) map[string]float64 {
	ctx, cancel := context.WithCancel(context.Background())
	before := s.memory()
	ready, wg := openWatches(ctx, s, watchers, everything)
	if !ready {
		log.Fatalf("%s: the watches do not open", s.name)
	}
	weight := s.memory() - before
	used, writes := s.deliveries(wg, watchers, rate, updates)
	cancel()
	wg.done.Wait()
	name := fmt.Sprintf("deliver 1.3 KB to each of %d watchers, %d/s", watchers, rate)
	rows := map[string]float64{
		name + " (CPU µs a delivery)":    used,
		name + ": age p99 (ms)":          percentile(wg.ages, 99),
		name + ": the writer's p50 (ms)": percentile(writes, 50),
	}
	if watchers >= 5000 { // fewer watches fit into the process's free memory
		rows[name+": growth of memory a watcher (KB)"] = weight * 1000 / float64(watchers)
	}
	return rows
}

// watches are open watches that record the arrival of each event.
type watches struct {
	done      sync.WaitGroup
	delivered atomic.Int64
	// open is the number of open watches.
	open atomic.Int64
	mu   sync.Mutex
	// ages are complete once the watches are closed.
	ages []time.Duration
}

// openTimeout bounds the time until all watches are open.
const openTimeout = 3 * time.Minute

// everything is the query of watches that receive every event.
func everything(int) string { return "" }

// ofAbsentName is the query of watches that differ, and receive no event.
func ofAbsentName(i int) string { return fmt.Sprintf("&fieldSelector=metadata.name%%3Dw%d", i) }

// streamsOfConnection is the number of streams that kube-apiserver and the gateway accept on a connection by default. A
// client would dial for each further watch.
const streamsOfConnection = 100

// openWatches opens watches of ConfigMaps over 20 connections, or over more if each had more than streamsOfConnection.
// query returns the further parameters of a watch's URL. openWatches returns false, and logs the first error, if the
// watches do not open within openTimeout.
func openWatches(ctx context.Context, s *server, watchers int, query func(i int) string) (bool, *watches) {
	w := &watches{}
	from := resourceVersion(s.do("GET", "/api/v1/namespaces/small/configmaps", "", nil, 200))
	conns := make([]*http.Client, max(20, (watchers+streamsOfConnection-1)/streamsOfConnection))
	for i := range conns {
		conns[i] = &http.Client{Transport: s.client.Transport.(*http.Transport).Clone()}
		s.doBy(conns[i], "GET", "/livez", "", nil, 200) // else each watch dials until HTTP/2 is known
	}
	var failure atomic.Pointer[error]
	var ready sync.WaitGroup
	for i := range watchers {
		ready.Add(1)
		w.done.Go(func() {
			resp, err := s.openWatch(ctx, conns[i%len(conns)],
				"/api/v1/namespaces/events/configmaps?watch=true&resourceVersion="+from+query(i), "")
			if err != nil {
				failure.CompareAndSwap(nil, &err)
				return
			}
			defer resp.Body.Close()
			w.open.Add(1)
			defer w.open.Add(-1)
			ready.Done()
			w.read(bufio.NewReaderSize(resp.Body, 8<<10))
		})
	}
	opened := make(chan struct{})
	go func() { ready.Wait(); close(opened) }()
	select {
	case <-opened:
		return true, w
	case <-time.After(openTimeout):
		if err := failure.Load(); err != nil {
			log.Printf("%s: %d of %d watches are open: %v", s.name, w.open.Load(), watchers, *err)
		}
		return false, w
	}
}

func (w *watches) read(lines *bufio.Reader) {
	var mine []time.Duration
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			break
		}
		if k := bytes.Index(line, []byte(`"sent":"`)); k >= 0 {
			sent, _ := strconv.ParseInt(string(line[k+8:k+8+19]), 10, 64)
			mine = append(mine, time.Since(time.Unix(0, sent)))
			w.delivered.Add(1)
		}
	}
	w.mu.Lock()
	w.ages = append(w.ages, mine...)
	w.mu.Unlock()
}

// deliveries makes updates at a rate and waits until every watch has all events. It returns CPU microseconds per
// delivery, and the writer's latencies.
func (s *server) deliveries(w *watches, watchers, rate, updates int) (used float64, writes []time.Duration) {
	before := s.begin()
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for i := range updates {
		<-tick.C
		at := time.Now()
		s.do("POST", "/api/v1/namespaces/events/configmaps", "",
			[]byte(fmt.Sprintf(
				`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"e%d-%d"},"data":{"sent":"%019d","pad":%q}}`,
				serial.Add(1), i, at.UnixNano(), strings.Repeat("x", 900))), 201)
		writes = append(writes, time.Since(at))
	}
	want := int64(updates * watchers)
	for deadline := time.Now().Add(20 * time.Second); w.delivered.Load() < want && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	n := w.delivered.Load()
	if n < want {
		log.Printf("%s: only %d of %d deliveries", s.name, n, want)
	}
	return (s.cpu() - before) * 1e6 / float64(n), writes
}

// herd starts fifty informers at once, as after the loss of an API server. Each has its own connection.
func herd(s *server) map[string]float64 {
	before, began := s.begin(), time.Now()
	peak := s.peak()
	defer peak()
	stop := make(chan struct{})
	defer close(stop)
	var wg sync.WaitGroup
	for range 50 {
		client, err := kubernetes.NewForConfigAndClient(s.rest(),
			&http.Client{Transport: s.client.Transport.(*http.Transport).Clone()})
		check(err)
		f := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace("bench"),
			informers.WithTransform(func(o any) (any, error) {
				p, ok := o.(*corev1.Pod)
				if !ok {
					return o, nil
				}
				return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
					Name:            p.Name,
					Namespace:       p.Namespace,
					ResourceVersion: p.ResourceVersion,
				}}, nil // the clients' memory is not measured
			}))
		informer := f.Core().V1().Pods().Informer()
		f.Start(stop)
		wg.Go(func() {
			if !cache.WaitForCacheSync(stop, informer.HasSynced) {
				log.Fatal("an informer does not sync")
			}
		})
	}
	wg.Wait()
	name := fmt.Sprintf("50 informers sync %d pods at once", *pods)
	return map[string]float64{
		name + " (s)":               time.Since(began).Seconds(),
		name + " (CPU s)":           s.cpu() - before,
		name + ": peak memory (MB)": peak(),
	}
}
