package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/watch"
	"watershed.dev/services/watchfanout"
)

// showTier lists replicas and resources. It names a replica that does not respond.
func TestStatusShowsTheTier(t *testing.T) {
	replica := func(revision int64, objects int) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(&watchfanout.Status{
				Ready:    true,
				Revision: revision,
				Behind:   -1,
				Resources: []cache.Status{
					{Name: "pods", Loaded: true, Objects: objects, Bytes: 2e6, Watches: 2},
					{Name: "nobody"},
				},
				Slowest: []watch.Slow{{Resource: "pods", Query: "namespace=x", Revision: 5, Waiting: 7}},
			})
		}))
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	var out strings.Builder
	gone := filepath.Join(t.TempDir(), "gone.sock")
	if !showTier(&out, []string{replica(10, 3), replica(11, 4), gone}) {
		t.Error("nobody answers")
	}
	shown := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"gone no response", "true 10 ? 0.0 ms", "true 11 ? 0.0 ms", "pods 2 4 0 4.0 MB 4",
		"7 5 namespace=x"} {
		if !strings.Contains(shown, want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	if strings.Contains(shown, "nobody") {
		t.Errorf("a resource without a cache is shown:\n%s", out.String())
	}
	if showTier(&out, []string{gone}) {
		t.Error("a replica responds")
	}
}

// If no process runs, the error names the flag to set.
func TestStatusOfNothing(t *testing.T) {
	dir := t.TempDir()
	if _, err := replicaAddresses(dir); err == nil || !strings.Contains(err.Error(), "--data-dir") {
		t.Errorf("%v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config", "watchfanout-0.yaml")
	const config = "debug-address: /x/watchfanout-0.sock\ntarget: [watchfanout]\n"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err := replicaAddresses(dir); err != nil || len(all) != 1 || replicaName(all[0]) != "watchfanout-0" {
		t.Errorf("%q, %v", all, err)
	}
}
