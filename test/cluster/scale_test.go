package cluster

import (
	"flag"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"watershed.dev/test/harness"
)

var scaled = flag.Bool("scale", false, "with 5,000 watches, and not with 200")

// The watch tier is scaled alone, from two replicas to six and back, while clients watch: they notice nothing.
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
	harness.Eventually(t, time.Minute, func() error { return c.missing([]int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) })
	r := newReport(t)
	to := func(replicas int) func() {
		return func() {
			out, err := exec.Command(harness.Watershed(), "split", "scale", fmt.Sprintf("watchfanout=%d", replicas),
				"--data-dir", s.Dir).CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			time.Sleep(3 * time.Second) // in which what is open moves
		}
	}
	r.phase(c, "two replicas", true, func() { time.Sleep(settled) })
	r.phase(c, "two to six", true, to(6))
	r.phase(c, "six", true, func() { time.Sleep(settled) })
	r.phase(c, "six to two", true, to(2))
	for _, w := range c.stop() {
		t.Error(w)
	}
	moved := s.Metric("gateway-0", "watershed_gateway_watch_moves_total") +
		s.Metric("gateway-1", "watershed_gateway_watch_moves_total")
	if moved == 0 {
		t.Error("nothing moved")
	}
	fmt.Printf("%d watches of %d resources, of whose shared streams %v moved while they were open:\n", watches,
		len(written), moved)
	r.table.Flush()
}
