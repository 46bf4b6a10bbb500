package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"watershed.dev/test/harness"
)

// TestAWatchResumes checks that a watch continues after its newest event if the server ends the connection.
func TestAWatchResumes(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		event := `{"type":%q,"object":{"metadata":{"name":%q,"resourceVersion":"%d"%s}}}` + "\n"
		switch req.URL.Query().Get("resourceVersion") {
		case "":
			fmt.Fprintf(w, event, "ADDED", "a", 5, "")
			fmt.Fprintf(w, event, "ADDED", "b", 4, "")
		case "5":
			fmt.Fprintf(w, event, "MODIFIED", "a", 6, `,"labels":{"last":"yes"}`)
			_ = http.NewResponseController(w).Flush()
			<-req.Context().Done()
		default:
			t.Errorf("%s", req.URL)
		}
	}))
	defer s.Close()
	client := &http.Client{Transport: &http.Transport{}}
	p := &pair{t: t, theirs: &side{base: s.URL, client: client}, ours: &side{base: s.URL, client: client}}
	w := p.watch("/pods?watch=1", "application/json")
	defer w.wg.Wait()
	defer w.cancel()
	harness.Eventually(t, harness.Soon, func() error {
		if n := w.behind.Load(); n > 0 {
			return fmt.Errorf("%d watches are not at the end", n)
		}
		return nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.received[p.ours]); n != 3 {
		t.Errorf("it has received %d events: %v", n, w.received[p.ours])
	}
}
