package main

import (
	"math/rand/v2"
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
