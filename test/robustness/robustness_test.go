package main

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"watershed.dev/test/harness"
)

// TestClientsSeeTheTruthUnderFaults runs the short form: a few faults with a random seed in each placement.
// `make robustness` is the long form.
func TestClientsSeeTheTruthUnderFaults(t *testing.T) {
	for _, placement := range []string{"split", "compact", hosts, mixed} {
		t.Run(placement, func(t *testing.T) {
			replicas := "watchfanout=3"
			if placement == "split" {
				replicas += ",etcd=3,nats=3"
			}
			seed := rand.Uint64N(1 << 32)
			t.Logf("seed %d", seed)
			r, err := run(t.Context(), options{
				watershed: harness.Watershed(),
				faults:    20,
				seed:      seed,
				placement: placement,
				replicas:  replicas,
				writers:   6,
				watchers:  24,
				expired:   -1,
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Log(r)
			if len(r.found) > 0 {
				t.Error("clients received false responses")
			}
		})
	}
}

// TestTheLogOfUpIsSearched checks that the search reads the output of a process, and the log of `up` in its --data-dir.
func TestTheLogOfUpIsSearched(t *testing.T) {
	c := &cluster{dir: t.TempDir()}
	c.processes = []*process{{name: "etcd-0", cluster: c}, {name: "host-0", cluster: c}}
	for name, text := range map[string]string{
		"etcd-0.log":           "Objects differ from etcd's\n",
		"host-0.log":           "Ready\n",
		"host-0/watershed.log": "Ready\nObjects differ from etcd's\n",
	} {
		path := filepath.Join(c.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if lines := c.logged("Objects differ"); len(lines) != 2 {
		t.Errorf("found %q", lines)
	}
}
