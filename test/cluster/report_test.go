package cluster

import (
	"fmt"
	"os"
	"testing"
	"text/tabwriter"
	"time"

	"watershed.dev/test/harness"
)

// report is a table of the effects on clients, phase by phase.
type report struct {
	*testing.T
	table *tabwriter.Writer
}

func newReport(t *testing.T) *report {
	r := &report{t, tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)}
	fmt.Fprintln(r.table,
		"PHASE\tTOOK\tWRITES\tTRIED AGAIN\tFAILED\tLONGEST WRITE\tEVENTS\tRESUMED\tRELISTS\tOLDEST EVENT")
	return r
}

// phase runs do while clients watch and write, waits until every watcher has received all writes, and reports the
// effects. quiet means that no watcher may list again.
func (r *report) phase(c *clients, title string, quiet bool, do func()) {
	r.Helper()
	c.phase()
	began := time.Now()
	do()
	wrote := c.writes()
	harness.Eventually(r, harness.Soon, func() error { return c.missing(wrote) })
	n := c.phase()
	fmt.Fprintf(
		r.table,
		"%s\t%.1f s\t%d\t%d\t%d\t%d ms\t%d\t%d\t%d\t%d ms\n",
		title,
		time.Since(began).Seconds(),
		n.writes,
		n.retried,
		n.failed,
		n.longest.Milliseconds(),
		n.events,
		n.resumed,
		n.relisted,
		n.oldest.Milliseconds(),
	)
	if n.events == 0 || n.failed > 0 || quiet && n.relisted > 0 {
		r.Errorf("%s: %d events, %d writes failed, %d relists", title, n.events, n.failed, n.relisted)
	}
}
