package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/test/harness"
)

// counted counts the list and watch requests for config maps over all connections.
type counted struct{ lists, watches atomic.Int64 }

type counting struct {
	http.RoundTripper
	*counted
}

func (c *counting) RoundTrip(req *http.Request) (*http.Response, error) {
	if strings.HasSuffix(req.URL.Path, "/configmaps") && req.Method == http.MethodGet {
		if req.URL.Query().Get("watch") != "" {
			c.watches.Add(1)
		} else {
			c.lists.Add(1)
		}
	}
	return c.RoundTripper.RoundTrip(req)
}

// connections returns n clients with separate connections, as n processes would have.
func connections(t *testing.T, s *harness.Server, n int, count *counted) []*http.Client {
	t.Helper()
	var all []*http.Client
	for range n {
		config := s.Config()
		config.Dial = s.Dialer()
		tr, err := rest.TransportFor(config)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &http.Client{Transport: &counting{tr, count}})
	}
	return all
}

// TestInformersDoNotNoticeThatTheWatchTierIsReplaced restarts every watchfanout replica, and then kills each, while a
// thousand informers are connected. No informer relists or loses its connection, and each sees every event once.
func TestInformersDoNotNoticeThatTheWatchTierIsReplaced(t *testing.T) {
	const number, replicas = 1000, 4
	s := harness.Split(t, "", fmt.Sprintf("--replicas=watchfanout=%d", replicas))
	writer := s.Client().CoreV1().ConfigMaps("default")
	count := &counted{}
	var events [number]atomic.Int64
	var last [number]atomic.Int64
	var repeated atomic.Int64
	stop := make(chan struct{})
	defer close(stop)
	var synced sync.WaitGroup
	clients := connections(t, s, 20, count)
	for n := range number {
		client, err := kubernetes.NewForConfigAndClient(s.Config(), clients[n%len(clients)])
		if err != nil {
			t.Fatal(err)
		}
		f := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace("default"))
		informer := f.Core().V1().ConfigMaps().Informer()
		saw := func(o any) {
			m := o.(*corev1.ConfigMap)
			if m.Data["n"] == "" {
				return
			}
			revision, _ := strconv.ParseInt(m.ResourceVersion, 10, 64)
			if last[n].Swap(revision) >= revision {
				repeated.Add(1)
			}
			events[n].Add(1)
		}
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    saw,
			UpdateFunc: func(_, o any) { saw(o) },
		}); err != nil {
			t.Fatal(err)
		}
		f.Start(stop)
		synced.Go(func() { cache.WaitForCacheSync(stop, informer.HasSynced) })
	}
	synced.Wait()
	lists, watches := count.lists.Load(), count.watches.Load()

	ctx, cancel := context.WithCancel(t.Context())
	var written atomic.Int64
	var writing sync.WaitGroup
	writing.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			m := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("r%d", n)},
				Data:       map[string]string{"n": fmt.Sprint(n)},
			}
			harness.TryWrite(t, func() error {
				_, err := writer.Create(context.Background(), m, metav1.CreateOptions{})
				return err
			})
			written.Add(1)
			time.Sleep(50 * time.Millisecond) // the writer's pace; not a wait for an event
		}
	})
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for n := range replicas {
			replace(t, s, fmt.Sprintf("watchfanout-%d", n), signal)
		}
	}
	cancel()
	writing.Wait()
	want := written.Load()
	harness.Eventually(t, harness.Soon, func() error {
		for n := range number {
			if got := events[n].Load(); got < want {
				return fmt.Errorf("informer %d has seen %d of %d events", n, got, want)
			}
		}
		return nil
	})
	lost := int64(0)
	for n := range number {
		lost += max(0, want-events[n].Load())
		repeated.Add(max(0, events[n].Load()-want))
	}
	relists, reconnects := count.lists.Load()-lists, count.watches.Load()-watches
	t.Logf("%d informers, %d replicas each restarted and each killed: %d events to each; %d relists, %d "+
		"disconnects, %d lost, %d repeated",
		number, replicas, want, relists, reconnects, lost, repeated.Load())
	if relists+reconnects+lost+repeated.Load() > 0 {
		t.Error("clients noticed")
	}
	expectOneEtcdWatch(t, s)
}

// replace ends a process and waits until its replacement is ready.
func replace(t *testing.T, s *harness.Server, name string, signal syscall.Signal) {
	t.Helper()
	pidFile := filepath.Join(s.Dir, name+".pid")
	before, pid := readPID(t, pidFile)
	if err := syscall.Kill(pid, signal); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, func() error {
		if after, _ := os.ReadFile(pidFile); string(after) == before {
			return fmt.Errorf("%s still has process %d", name, pid)
		}
		return s.CheckHealthy(name)
	})
}

// TestEtcdServesOneWatchWhateverTheTier scales the watch tier. It checks that etcd serves one watch for any number of
// replicas and clients, and that at most two replicas load a resource.
func TestEtcdServesOneWatchWhateverTheTier(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "", "--replicas=watchfanout=1")
	for _, tier := range []struct{ replicas, watches int }{{1, 500}, {2, 500}, {4, 5000}} {
		t.Run(fmt.Sprint(tier.replicas), func(t *testing.T) {
			s.Scale(fmt.Sprintf("watchfanout=%d", tier.replicas))
			for n := range tier.replicas {
				replica := fmt.Sprint("watchfanout-", n)
				harness.Eventually(t, harness.Soon, func() error { return s.CheckHealthy(replica) })
			}
			etcdServesOneWatch(t, s, tier.watches)
			if tier.replicas == 4 {
				atMostTwoLoad(t, s, tier.replicas)
			}
		})
	}
}

// atMostTwoLoad lists a resource over 20 connections, and checks that at least a replica and at most two replicas have
// loaded it. A gateway may still lack a replica that has just started, so it tries several resources.
func atMostTwoLoad(t *testing.T, s *harness.Server, replicas int) {
	t.Helper()
	clients := connections(t, s, 20, &counted{})
	var loads []int
	for _, resource := range []string{"podtemplates", "limitranges", "replicationcontrollers", "persistentvolumes"} {
		for _, c := range clients {
			resp, err := c.Get(fmt.Sprintf("https://127.0.0.1:%d/api/v1/%s", s.Port, resource))
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("a list of %s: %s", resource, resp.Status)
			}
		}
		n := 0
		for i := range replicas {
			resp, err := s.Debug(fmt.Sprint("watchfanout-", i)).Get("http://watchfanout/metrics")
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text),
				fmt.Sprintf("\napiserver_watch_cache_initializations_total{group=\"\",resource=%q} 1\n", resource)) {
				n++
			}
		}
		if n == 1 || n == 2 {
			return
		}
		loads = append(loads, n)
	}
	t.Errorf("of %d replicas, %v have loaded a resource after lists over all connections", replicas, loads)
}

// etcdServesOneWatch opens watches over 20 connections, compares etcd's number of watches, and closes them.
func etcdServesOneWatch(t *testing.T, s *harness.Server, watches int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	clients := connections(t, s, 20, &counted{})
	var open atomic.Int64
	var wg sync.WaitGroup
	for n := range watches {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, "GET",
				fmt.Sprintf("https://127.0.0.1:%d/api/v1/%s?watch=true", s.Port,
					[]string{"pods", "nodes", "services", "configmaps", "secrets"}[n%5]), nil)
			if err != nil {
				t.Error(err)
				return
			}
			resp, err := clients[n%len(clients)].Do(req)
			for ; err != nil && ctx.Err() == nil; resp, err = clients[n%len(clients)].Do(req) {
				t.Logf("watch %d: %v", n, err)
				time.Sleep(time.Second) // a reflector's pause: 5,000 clients connect at once
			}
			if err != nil {
				return
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("%s", resp.Status)
			}
			open.Add(1)
			<-ctx.Done()
		})
	}
	harness.Eventually(t, harness.Soon, func() error {
		if n := open.Load(); n < int64(watches) {
			return fmt.Errorf("%d of %d watches are open", n, watches)
		}
		return nil
	})
	expectOneEtcdWatch(t, s)
	cancel()
	wg.Wait()
}

// TestAnotherPublisherTakesOver checks that another registry publishes if the publishing registry is killed: a watch
// receives the next event within seconds.
func TestAnotherPublisherTakesOver(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	maps := s.Client().CoreV1().ConfigMaps("default")
	w, err := maps.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for n := range 2 { // one of the two is the publisher
		name := fmt.Sprintf("registry-%d", n)
		killed := time.Now()
		replace(t, s, name, syscall.SIGKILL)
		harness.Eventually(t, harness.Soon, func() error {
			_, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "after-" + name}},
				metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) { // an attempt of unknown result made it
				return nil
			}
			return err
		})
		deadline := time.After(harness.Soon)
		for seen := false; !seen; {
			select {
			case e := <-w.ResultChan():
				m, ok := e.Object.(*corev1.ConfigMap)
				seen = ok && m.Name == "after-"+name
			case <-deadline:
				t.Fatal("the event does not come")
			}
		}
		t.Logf("%s killed: an event after it came %.1f s after the kill", name, time.Since(killed).Seconds())
	}
}
