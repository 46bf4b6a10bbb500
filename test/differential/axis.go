package main

import (
	"testing"

	"watershed.dev/test/harness"
)

// axis asks servers of many configurations, each pair of which has the same flags, keys and certificates.
type axis struct {
	t      *testing.T
	report *report
	// keys are those of the test's OpenID issuers, by id.
	keys map[string]any
	// used: the next pair's stores have been served without its flags before.
	used bool
}

// parallelRequests is how many requests that do not depend on each other are sent at a time.
const parallelRequests = 8

// configuration starts a pair with flags, which may name files that it writes to a directory and a server of the
// test's own, and asks it.
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
