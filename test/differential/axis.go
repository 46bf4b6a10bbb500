package main

import (
	"testing"

	"watershed.dev/test/harness"
)

// axes compares pairs of servers with many configurations. The configurations run in parallel.
type axes struct {
	t *testing.T
	// report has the differences of all configurations.
	report *report
}

// axis compares a pair of servers with a configuration. Both have the same flags, keys and certificates.
type axis struct {
	t      *testing.T
	report *report
	// keys are the keys of the test's OpenID issuers, by ID.
	keys map[string]any
}

// parallelRequests is the number of independent requests in flight to a pair.
const parallelRequests = 8

// start starts kube-apiserver and Watershed with the same flags.
type start func(t testing.TB, flags ...string) (theirs, ours *harness.Server)

// configuration starts a pair and calls ask with it, in a parallel subtest. flags may write files to dir, and may name
// the web server w.
func (x *axes) configuration(name string, start start, flags func(a *axis, dir string, w *web) []string,
	ask func(a *axis, p *pair, w *web, dir string)) {
	x.t.Run(name, func(t *testing.T) {
		t.Parallel()
		a := &axis{t: t, report: newReport(x.report.known)}
		a.report.begin(name)
		defer func() { x.report.add(a.report) }()
		dir, w := harness.TempDir(t), newWeb(t)
		theirs, ours := start(t, flags(a, dir, w)...)
		p := &pair{
			t: t, report: a.report,
			theirs: newSide(t, "kube-apiserver", theirs),
			ours:   newSide(t, "watershed", ours),
		}
		p.inFlight.SetLimit(parallelRequests)
		defer func() { _ = p.inFlight.Wait() }()
		ask(a, p, w, dir)
	})
}
