package cluster

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"watershed.dev/test/harness"
)

var scaled = flag.Bool("scale", false, "with 5,000 watches instead of 200")

// TestTheWatchTierScalesAlone scales only the watch tier, from two replicas to six and back. Clients watch meanwhile;
// open watches move, and the clients must not notice.
func TestTheWatchTierScalesAlone(t *testing.T) {
	t.Run("split", func(t *testing.T) { scales(t, "gateway", harness.Split) })
	t.Run("compact", func(t *testing.T) { scales(t, "front", harness.Compact) })
}

// scales scales the watch tier of a server. set is the set of services with the gateway.
func scales(t *testing.T, set string, startServer func(testing.TB, string, ...string) *harness.Server) {
	watches, pause, settled := 200, writePause, time.Second
	if *scaled {
		watches, pause, settled = 5000, 100*time.Millisecond, 5*time.Second
	}
	s := startServer(t, "", "--replicas=watchfanout=2")
	c, err := start(t.Context(), s.Config(), watches, pause)
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, func() error { return c.missing(slices.Repeat([]int{1}, len(kinds))) })
	gateways := func(metric string) (sum float64) {
		for n := range 2 {
			sum += s.Metric(fmt.Sprintf("%s-%d", set, n), metric)
		}
		return sum
	}
	broken := gateways("watershed_gateway_watch_resumes_total")
	r := newReport(t)
	r.phase(c, "two replicas", true, func() { time.Sleep(settled) })
	r.phase(c, "two to six", true, func() {
		s.Scale("watchfanout=6")
		for i := range 6 {
			ready(t, s, fmt.Sprintf("watchfanout-%d", i))
		}
		harness.Eventually(t, harness.Soon, func() error {
			if gateways("watershed_gateway_watch_reassignments_total") == 0 {
				return errors.New("nothing moves")
			}
			return nil
		})
		time.Sleep(settled) // the effects of the remaining moves
	})
	r.phase(c, "six to two", true, func() {
		s.Scale("watchfanout=2")
		time.Sleep(settled)
	})
	for _, w := range c.stop() {
		t.Error(w)
	}
	moved := gateways("watershed_gateway_watch_reassignments_total")
	broken = gateways("watershed_gateway_watch_resumes_total") - broken
	fmt.Printf("%d watches of %d resources; of the streams that they share %v moved, and %v broke off and went on:\n",
		watches, len(kinds), moved, broken)
	r.table.Flush()
}

// ready waits until a process reports readiness.
func ready(t *testing.T, s *harness.Server, process string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error { return s.CheckHealthy(process) })
}
