package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// hot is an object that changes often, and its watches.
type hot struct {
	t *testing.T
	s *harness.Server
	// changes is the number of changes. filler is the data beside the change's number.
	changes int
	filler  string
	// seen counts the events of the tenant's watches. whole counts the watches that received the last event.
	seen, whole atomic.Int64
}

func newHot(t *testing.T, s *harness.Server, changes int, filler string) *hot {
	s.Kubectl("create", "configmap", "hot")
	s.Kubectl("create", "role", "reader", "--verb=get,list,watch", "--resource=configmaps")
	s.Kubectl("create", "rolebinding", "tenant", "--role=reader", "--user=tenant")
	h := &hot{t: t, s: s, changes: changes, filler: filler}
	harness.Eventually(t, harness.Soon, func() error {
		_, err := h.tenant(false).CoreV1().ConfigMaps("default").Get(t.Context(), "hot", metav1.GetOptions{})
		return err
	})
	return h
}

// tenant returns the client of a user with read access to the object, over HTTP/1.1 or HTTP/2.
func (h *hot) tenant(http1 bool) kubernetes.Interface {
	config := h.s.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: "tenant"}
	if http1 {
		config.NextProtos = []string{"http/1.1"}
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper {
			return roundTripper(func(req *http.Request) (*http.Response, error) {
				resp, err := rt.RoundTrip(req)
				if err == nil && resp.ProtoMajor != 1 {
					h.t.Errorf("it is %s", resp.Proto)
				}
				return resp, err
			})
		})
	}
	return kubernetes.NewForConfigOrDie(config)
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return r(req) }

// follow watches the object. It fails the test unless every change arrives in order.
func (h *hot) follow(client kubernetes.Interface, changed func(n int)) {
	t := h.t
	t.Helper()
	w, err := client.CoreV1().ConfigMaps("default").Watch(t.Context(),
		metav1.ListOptions{FieldSelector: "metadata.name=hot"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	<-w.ResultChan() // the object's Added event
	go func() {
		last := 0
		for e := range w.ResultChan() {
			c, ok := e.Object.(*corev1.ConfigMap)
			if t.Context().Err() != nil {
				return
			}
			if !ok {
				t.Errorf("%v", e)
				return
			}
			if n := len(c.Data["n"]); n != last+1 {
				t.Errorf("change %d came after %d", n, last)
				return
			}
			last++
			changed(last)
		}
	}()
}

// follows opens the tenant's watches, which share one connection if it is HTTP/2.
func (h *hot) follows(client kubernetes.Interface, watches int) {
	for range watches {
		h.follow(client, func(n int) {
			if h.seen.Add(1); n == h.changes {
				h.whole.Add(1)
			}
		})
	}
}

// change makes all the changes.
func (h *hot) change() {
	client := h.s.Client()
	for n := range h.changes {
		patch := fmt.Appendf(nil, `{"data":{"n":%q,"filler":%q}}`, strings.Repeat("x", n+1), h.filler)
		if _, err := client.CoreV1().ConfigMaps("default").Patch(h.t.Context(), "hot", types.MergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			h.t.Fatal(err)
		}
	}
}

// all waits until that number of watches has received every event.
func (h *hot) all(watches int) {
	h.t.Helper()
	harness.Eventually(h.t, harness.Soon, func() error {
		if n := h.whole.Load(); n < int64(watches) {
			return fmt.Errorf("%d of %d watches have everything, and all together %d events", n, watches, h.seen.Load())
		}
		return nil
	})
}

// TestAUsersWatchesComeAtTheirRate checks that a user's watches receive events at the user's rate. Excess events arrive
// later, complete and in order, and other users' watches do not wait.
func TestAUsersWatchesComeAtTheirRate(t *testing.T) {
	const watches, rate, burst = 20, 100, 1000
	h := newHot(t, harness.Up(t, "", fmt.Sprintf("--max-watch-rate-per-user=%d", rate)), 100, "")
	began := time.Now()
	h.follows(h.tenant(false), watches/2)
	h.follows(h.tenant(true), watches/2)
	at := make(chan int64, 1)
	h.follow(h.s.Client(), func(n int) {
		if n == h.changes {
			at <- h.seen.Load()
		}
	})
	h.change()
	select {
	case n := <-at:
		// one watch may exceed the limit with its whole backlog, at most every change, and the limiter goes into debt
		most := burst + rate*time.Since(began).Seconds() + float64(h.changes)
		if float64(n) > most {
			t.Errorf("the tenant had %d events in %v, and may have %.0f", n, time.Since(began), most)
		}
	case <-time.After(harness.Soon):
		t.Fatal("a user without a limit waits")
	}
	h.all(watches)
}

// TestEventsThatFillAConnectionComeInOrder checks that events beyond a connection's queue arrive, complete and in
// order.
func TestEventsThatFillAConnectionComeInOrder(t *testing.T) {
	t.Parallel()
	const watches = 100
	h := newHot(t, harness.Up(t, "", "--max-watch-rate-per-user=0"), 20, strings.Repeat("y", 100<<10))
	h.follows(h.tenant(false), watches)
	h.change()
	h.all(watches)
}
