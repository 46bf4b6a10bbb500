package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/process"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/watch"
	"watershed.dev/services/registry"
	"watershed.dev/services/registry/etcdstatus"
	"watershed.dev/services/watchfanout"
)

// state returns the states of a report with the state of a service.
func state(t *testing.T, service string, st any) map[string]json.RawMessage {
	t.Helper()
	data, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]json.RawMessage{service: data}
}

// status --watch clears a terminal only.
func TestOnlyATerminalIsCleared(t *testing.T) {
	_, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	if text := clearScreen(pipe); text != "" {
		t.Errorf("a pipe receives %q", text)
	}
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer terminal.Close()
	t.Setenv("TERM", "xterm")
	if clearScreen(terminal) == "" {
		t.Error("a terminal is not cleared")
	}
	t.Setenv("TERM", "dumb")
	if text := clearScreen(terminal); text != "" {
		t.Errorf("a dumb terminal receives %q", text)
	}
}

// The output lists processes, stores, replicas and resources. Resources without objects share a row. It names a process
// that does not respond.
func TestStatusShowsEveryProcess(t *testing.T) {
	at := func(r *process.Report) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			r.Time = time.Now()
			process.WriteReports(w, r)
		}))
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	replica := func(pid int, revision int64, objects int) string {
		return at(&process.Report{Host: "a", PID: pid, Services: []string{"watchfanout"}, Version: "v1",
			Started: time.Now().Add(-time.Hour), MemoryBytes: 3e6, RequestsPerSecond: 7.5, P99Seconds: 0.002,
			States: state(t, "watchfanout", &watchfanout.Status{
				Ready:    true,
				Revision: revision,
				Behind:   -1,
				Resources: []cache.Status{
					{Name: "pods", Loaded: true, Objects: objects, Bytes: 2e6, Watches: 2},
					{Name: "jobs", Loaded: true, Bytes: 1e5, Watches: 1},
					{Name: "cronjobs", Loaded: true, Watches: 3},
					{Name: "nobody"},
				},
				Slowest: []watch.Slow{{Resource: "pods", Revision: 5, Waiting: 7}},
			})})
	}
	store := at(&process.Report{Host: "a", PID: 3, Services: []string{"registry"}, Version: "v1",
		NotReady: map[string]string{"registry": "etcd"},
		States: state(t, "registry", &registry.State{
			Etcds: []etcdstatus.Status{{Alarms: []string{"NOSPACE"},
				Members: []etcdstatus.Member{
					{Endpoint: "https://e:2379", Version: "3.6.1", Leader: true, Bytes: 5e6}}}},
			Logs: []registry.LogState{
				{Publishing: true, Revision: 12, Leader: "n-0", Current: 1, Wanted: 3, Messages: 9}},
		})})
	gone := filepath.Join(t.TempDir(), "gone.sock")
	show := func(addresses ...string) (string, error) {
		var out strings.Builder
		f := &statusFlags{Options: inspect.Options{Addresses: addresses}}
		err := f.show(context.Background(), &out)
		return strings.Join(strings.Fields(out.String()), " "), err
	}
	shown, err := show(replica(1, 10, 3), replica(2, 11, 4), store, gone)
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{
		"no response " + gone, "a/1 watchfanout v1 - true 60m 3.0 MB 7.5 ≤ 2 ms", "a/3 registry v1 - false",
		"https://e:2379 3.6.1 true 5.0 MB", "NOSPACE", "main a/3 true 12 n-0 1/3 9",
		"a/1 true 10 ? 0.0 ms", "a/2 true 11 ? 0.0 ms", "pods 2 4 0 4.0 MB 4 2 others 2 0 0 0.2 MB 8", "pods a/2 7 5",
	} {
		if !strings.Contains(shown, want) {
			t.Errorf("%q is not in\n%s", want, shown)
		}
	}
	if strings.Contains(shown, "nobody") || strings.Contains(shown, "jobs") {
		t.Errorf("a resource without a cache or without objects is shown:\n%s", shown)
	}
	shown, _ = show(at(&process.Report{Host: "a", PID: 1, Services: []string{"watchfanout"},
		States: state(t, "watchfanout", &watchfanout.Status{Resources: []cache.Status{{Name: "jobs", Loaded: true}}})}))
	if !strings.Contains(shown, "jobs 1 0 0") {
		t.Errorf("the only resource without objects has lost its name:\n%s", shown)
	}
	shown, err = show(gone)
	if err == nil || !strings.Contains(shown, "no response "+gone) || strings.Contains(shown, "REPLICA") {
		t.Errorf("without a process: %v\n%s", err, shown)
	}
}
