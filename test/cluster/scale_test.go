package cluster

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"watershed.dev/test/harness"
)

var scaled = flag.Bool("scale", false, "with 5,000 watches, and not with 200")

// The watch tier is scaled alone, from two replicas to six and back, while clients watch: what is open moves, and they
// notice nothing.
func TestTheWatchTierScalesAlone(t *testing.T) {
	watches, pause, settled := 200, writePause, time.Second
	if *scaled {
		watches, pause, settled = 5000, 100*time.Millisecond, 5*time.Second
	}
	s := harness.Split(t, "", "--replicas=watchfanout=2")
	c, err := start(t.Context(), s.Config(), watches, pause)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, time.Minute, func() error { return c.missing(slices.Repeat([]int{1}, len(kinds))) })
	gateways := func(metric string) (sum float64) {
		for _, g := range []string{"gateway-0", "gateway-1"} {
			sum += s.Metric(g, metric)
		}
		return sum
	}
	broken := gateways("watershed_gateway_watch_resumes_total")
	to := func(replicas int) func() {
		return func() {
			moved := gateways("watershed_gateway_watch_moves_total")
			s.Scale(fmt.Sprintf("watchfanout=%d", replicas))
			harness.Eventually(t, time.Minute, func() error {
				if gateways("watershed_gateway_watch_moves_total") == moved {
					return fmt.Errorf("nothing moves to %d replicas", replicas)
				}
				return nil
			})
			time.Sleep(settled) // of what clients notice while the rest moves
		}
	}
	r := newReport(t)
	r.phase(c, "two replicas", true, func() { time.Sleep(settled) })
	r.phase(c, "two to six", true, to(6))
	r.phase(c, "six to two", true, to(2))
	for _, w := range c.stop() {
		t.Error(w)
	}
	moved := gateways("watershed_gateway_watch_moves_total")
	broken = gateways("watershed_gateway_watch_resumes_total") - broken
	fmt.Printf("%d watches of %d resources; of the streams that they share %v moved, and %v broke off and went on:\n",
		watches, len(kinds), moved, broken)
	r.table.Flush()
}
