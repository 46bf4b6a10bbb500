package main

import (
	"testing"

	"watershed.dev/test/harness"
)

// axis compares pairs of servers with many configurations. Both servers of a pair have the same flags, keys and
// certificates.
type axis struct {
	t      *testing.T
	report *report
	// keys are the keys of the test's OpenID issuers, by ID.
	keys map[string]any
	// used means that the next pair's stores were already served without its flags.
	used bool
}

// parallelRequests is the number of independent requests in flight.
const parallelRequests = 8

// configuration starts a pair and calls ask with it. flags may write files to dir, and may name the web server w.
func (a *axis) configuration(name string, flags func(dir string, w *web) []string,
	ask func(p *pair, w *web, dir string)) {
	a.report.begin(name)
	whole := a.t
	defer func() { a.t = whole }()
	whole.Run(name, func(t *testing.T) {
		a.t = t
		dir, w := harness.TempDir(t), newWeb(t)
		twins := harness.Twins
		if a.used {
			twins = harness.UsedTwins
		}
		theirs, ours := twins(t, flags(dir, w)...)
		p := &pair{
			t: t, report: a.report,
			theirs: newSide(t, "kube-apiserver", theirs),
			ours:   newSide(t, "watershed", ours),
		}
		p.inFlight.SetLimit(parallelRequests)
		defer func() { _ = p.inFlight.Wait() }()
		ask(p, w, dir)
	})
}
