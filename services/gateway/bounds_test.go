package gateway

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
)

const namespaces = "/api/v1/namespaces"

// A read beyond --max-requests-inflight gets 429.
func TestReadsInFlightAreBounded(t *testing.T) {
	come, may := make(chan struct{}), make(chan struct{})
	var lists atomic.Int32
	g := newTestGateway(t, &fakeServices{list: func(string) {
		if lists.Add(1) == 1 { // the first list waits
			close(come)
			<-may
		}
	}}, "--max-requests-inflight=1")
	eventually(t, func() bool { return g.discovery.View() != nil })
	first := make(chan int)
	go func() {
		code, _, _ := g.doRequest(http.MethodGet, namespaces, "bob")
		first <- code
	}()
	<-come
	if code, body, h := g.doRequest(http.MethodGet, namespaces, "bob"); code != http.StatusTooManyRequests ||
		h.Get("Retry-After") == "" {
		t.Errorf("a second read: %d %.200s", code, body)
	}
	close(may)
	if code := <-first; code != http.StatusOK {
		t.Errorf("the first read: %d", code)
	}
}

// The registry serves three lists of a user at a time for the watch tier, or four of a user of system:masters. 16 lists
// of a user wait, or 64 of a user of system:masters, and further lists get 429.
func TestListsForTheWatchTierAreBounded(t *testing.T) {
	t.Run("bob", func(t *testing.T) { listsWait(t, "bob", 3, 16) })
	t.Run("admin", func(t *testing.T) { listsWait(t, "admin", 4, 64) })
}

func listsWait(t *testing.T, token string, atATime, waiting int) {
	var mu sync.Mutex
	under, most := map[string]int{}, 0
	may := make(chan struct{})
	o := &fakeServices{list: func(query string) {
		mu.Lock()
		under[query]++ // the gateway may hedge a list if registry is slow
		most = max(most, len(under))
		mu.Unlock()
		<-may
		mu.Lock()
		defer mu.Unlock()
		if under[query]--; under[query] == 0 {
			delete(under, query)
		}
	}}
	o.unavailable.Store("watch tier")
	g := newTestGateway(t, o)
	eventually(t, func() bool { return g.discovery.View() != nil })
	const refused = 3
	all := atATime + waiting + refused
	codes := make(chan int, all)
	for i := range all {
		go func() {
			code, _, _ := g.doRequest(http.MethodGet, fmt.Sprintf("%s?labelSelector=l%d", namespaces, i), token)
			codes <- code
		}()
	}
	let := sync.OnceFunc(func() { close(may) })
	t.Cleanup(let)
	eventually(t, func() bool { // while no list ends
		mu.Lock()
		defer mu.Unlock()
		return len(under) == atATime && len(codes) == refused
	})
	let()
	count := map[int]int{}
	for range all {
		count[<-codes]++
	}
	if count[http.StatusTooManyRequests] != refused || count[http.StatusOK] != atATime+waiting || most != atATime {
		t.Errorf("answers by status: %v; %d lists at a time, want %d", count, most, atATime)
	}
}
