package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// witnesses are watches of the config maps in the namespace default. They resume, as a reflector does. The test fails
// if a watch cannot resume.
type witnesses struct {
	t   *testing.T
	url string

	mu   sync.Mutex
	open int
	// created has the names of the created config maps, by watch.
	created [][]string
	// broken has the client's port of each watch that ended.
	broken []int
}

// witness opens n watches over some connections. They run until the test ends.
func witness(t *testing.T, s *harness.Server, n, over int) *witnesses {
	t.Helper()
	list, err := s.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := &witnesses{
		t:       t,
		url:     s.Config().Host + "/api/v1/namespaces/default/configmaps?watch=true&allowWatchBookmarks=true",
		created: make([][]string, n),
	}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	clients := connections(t, s, over, &counted{})
	for i := range n {
		client := clients[i%over]
		running.Go(func() {
			revision := list.ResourceVersion
			for t.Context().Err() == nil && w.watch(t.Context(), i, client, &revision) {
				time.Sleep(100 * time.Millisecond) // a reflector's pause
			}
		})
	}
	harness.Eventually(t, harness.Soon, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.open < n {
			return fmt.Errorf("%d of %d watches are open", w.open, n)
		}
		return nil
	})
	return w
}

// watch keeps watch n open over a connection. It returns false if the client has to list again.
func (w *witnesses) watch(ctx context.Context, n int, client *http.Client, revision *string) (resumes bool) {
	port := 0
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) {
		port = c.Conn.LocalAddr().(*net.TCPAddr).Port
	}})
	req, err := http.NewRequestWithContext(traced, "GET", w.url+"&resourceVersion="+*revision, nil)
	if err != nil {
		w.t.Error(err)
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return true
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusGone {
		w.t.Errorf("watch %d from %s: %s", n, *revision, resp.Status)
		return false
	}
	if resp.StatusCode != http.StatusOK {
		return true
	}
	w.mu.Lock()
	w.open++
	w.mu.Unlock()
	for decoder := json.NewDecoder(resp.Body); ; {
		var e metav1.WatchEvent
		if err := decoder.Decode(&e); err != nil {
			if ctx.Err() == nil {
				w.mu.Lock()
				w.broken = append(w.broken, port)
				w.mu.Unlock()
			}
			return true
		}
		var o metav1.PartialObjectMetadata
		if err := json.Unmarshal(e.Object.Raw, &o); err != nil || e.Type == "ERROR" {
			w.t.Errorf("watch %d that had come to %s: %s", n, *revision, e.Object.Raw)
			return false
		}
		*revision = o.ResourceVersion
		if e.Type == "ADDED" {
			w.mu.Lock()
			w.created[n] = append(w.created[n], o.Name)
			w.mu.Unlock()
		}
	}
}

// expect waits until each watch has received the creation of these config maps, once and in order.
func (w *witnesses) expect(names []string) {
	w.t.Helper()
	harness.Eventually(w.t, harness.Soon, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		for n, created := range w.created {
			if !slices.Equal(created, names) {
				return fmt.Errorf("watch %d shows %q, not %q", n, created, names)
			}
		}
		return nil
	})
}

// takeBroken returns the client's port of each watch that has ended since the last call.
func (w *witnesses) takeBroken() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	broken := w.broken
	w.broken = nil
	return broken
}

// sockets returns the remote ports of a process's TCP sockets in a state (0A: listening, 01: established) on a port.
func sockets(pid, port int, state string) (remote []int, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/net/tcp", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	own := map[string]bool{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		target, _ := os.Readlink(fd)
		own[target] = true
	}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		c := strings.Fields(lines.Text())
		if len(c) < 10 || c[3] != state || !strings.HasSuffix(c[1], fmt.Sprintf(":%04X", port)) ||
			!own["socket:["+c[9]+"]"] {
			continue
		}
		var address, n int
		if _, err := fmt.Sscanf(c[2], "%X:%X", &address, &n); err != nil {
			return nil, err
		}
		remote = append(remote, n)
	}
	return remote, nil
}
