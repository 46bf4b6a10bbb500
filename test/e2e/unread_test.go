package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// unread opens n watches of a tenant's ConfigMaps and reads no event. Each watch has its own selector. The connections
// have small HTTP/2 windows.
func unread(t *testing.T, s *harness.Server, token string, n int) {
	t.Helper()
	tls, err := rest.TLSConfigFor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: s.Config().CAData,
		CAFile: s.Config().CAFile}})
	if err != nil {
		t.Fatal(err)
	}
	const connections = 4
	var wg sync.WaitGroup
	var opened atomic.Int64
	for c := range connections {
		transport := &http.Transport{
			TLSClientConfig:   tls.Clone(),
			ForceAttemptHTTP2: true,
			HTTP2:             &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10},
		}
		t.Cleanup(transport.CloseIdleConnections)
		client := &http.Client{Transport: harness.Retrying(transport)}
		wg.Go(func() {
			for i := c; i < n; i += connections {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.Config().Host+
					"/api/v1/namespaces/t/configmaps?watch=1&resourceVersion=0&labelSelector="+
					url.QueryEscape(fmt.Sprintf("x!=%d", i)), nil)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Authorization", "Bearer "+token)
				resp, err := client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				context.AfterFunc(t.Context(), func() { resp.Body.Close() })
				if resp.StatusCode != http.StatusOK { // a watch is accepted even if its user holds too much memory
					t.Errorf("watch %d: %s", i, resp.Status)
					return
				}
				opened.Add(1)
			}
		})
	}
	wg.Wait()
	t.Logf("%d of %d watches are open", opened.Load(), n)
}

// TestUnreadWatchesAreBounded checks that one tenant's unread watches use bounded memory in the watch tier and the
// gateways, whatever the tenant writes. Events of other tenants are at most 10 s old at p99, and at most 30 s old in
// all (N4 of 2026-11).
func TestUnreadWatchesAreBounded(t *testing.T) {
	for name, initial := range map[string]bool{"initial events": true, "changes": false} {
		t.Run(name, func(t *testing.T) { unreadWatches(t, initial) })
	}
}

// unreadWatches opens a tenant's watches and updates a large object. initial creates the object before the watches.
func unreadWatches(t *testing.T, initial bool) {
	const watches, updates = 2000, 20
	t.Setenv("GOMEMLIMIT", "1GiB") // as in a container
	s := harness.Split(t, "")
	token := tenant(t, s, "t")
	update := func(n int) {
		t.Helper()
		method, path := http.MethodPut, "/api/v1/namespaces/t/configmaps/large"
		if n == 0 {
			method, path = http.MethodPost, "/api/v1/namespaces/t/configmaps"
		}
		body := fmt.Appendf(nil,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"large"},"data":{"n":"%d","x":%q}}`,
			n, strings.Repeat("x", 1_000_000))
		write(t, s, token, method, path, "application/json", body)
	}
	if initial {
		update(0)
	}
	unread(t, s, token, watches)
	ages := others(t, s, tenant(t, s, "other"), "other")
	processes := []string{"watchfanout-0", "watchfanout-1", "gateway-0", "gateway-1"}
	most := []int{512, 512, 1200, 1200} // a gateway's limit is 1 GiB, plus the program itself
	peaks := make([]int, len(processes))
	look := func() {
		for i, name := range processes {
			peaks[i] = max(peaks[i], resident(t, pid(t, s, name)))
		}
	}
	look()
	t.Logf("before the updates: %v %v MB", processes, peaks)
	if !initial {
		update(0)
	}
	for n := range updates {
		update(n + 1)
		look()
	}
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(100 * time.Millisecond) {
		look() // the last update may still be in flight
	}
	t.Logf("at most: %v %v MB", processes, peaks)
	for i, name := range processes {
		if peaks[i] > most[i] {
			t.Errorf("%s takes %d MB, more than %d", name, peaks[i], most[i])
		}
	}
	all := ages()
	p99, oldest := all[len(all)*99/100], all[len(all)-1]
	t.Logf("events of others: %d, age p50 %v, p99 %v, at most %v", len(all), all[len(all)/2], p99, oldest)
	if p99 > 10*time.Second || oldest > 30*time.Second {
		t.Errorf("the events of another namespace are %v old at p99, and %v at most", p99, oldest)
	}
}

// others watches ConfigMaps as another tenant, which has the same limits, and creates ten a second. The returned
// function ends both. It returns the events' ages in ascending order: the time from before the write to the watch.
func others(t *testing.T, s *harness.Server, token, namespace string) func() []time.Duration {
	t.Helper()
	config := rest.AnonymousClientConfig(s.Config())
	config.BearerToken = token
	config.QPS = -1
	client := kubernetes.NewForConfigOrDie(config).CoreV1().ConfigMaps(namespace)
	w, err := client.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var ages []time.Duration
	written := map[string]time.Time{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			name := fmt.Sprintf("age-%d", i)
			mu.Lock()
			written[name] = time.Now()
			mu.Unlock()
			harness.TryWrite(t, func() error {
				_, err := client.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
					metav1.CreateOptions{})
				if ctx.Err() != nil {
					return nil
				}
				return err
			})
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	go func() {
		for e := range w.ResultChan() {
			c, ok := e.Object.(*corev1.ConfigMap)
			if !ok {
				if ctx.Err() == nil {
					t.Errorf("%v", e)
				}
				return
			}
			mu.Lock()
			if at, ok := written[c.Name]; ok {
				ages = append(ages, time.Since(at))
				delete(written, c.Name)
			}
			mu.Unlock()
		}
	}()
	return func() []time.Duration {
		cancel()
		<-done
		harness.Eventually(t, harness.Soon, func() error {
			mu.Lock()
			defer mu.Unlock()
			if len(written) > 1 { // the last write may have been interrupted
				return fmt.Errorf("%d events have not come", len(written))
			}
			return nil
		})
		w.Stop()
		mu.Lock()
		defer mu.Unlock()
		slices.Sort(ages)
		return ages
	}
}
