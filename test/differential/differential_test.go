package main

import (
	"cmp"
	"os"
	"testing"
)

// TestAnswersAreKubeAPIServers runs the short form of `make differential`: every phase, with fewer random steps.
func TestAnswersAreKubeAPIServers(t *testing.T) {
	t.Parallel()
	run(t, options{
		seed:   7,
		steps:  shortSteps,
		fuzz:   3,
		form:   "up",
		out:    t.TempDir(),
		phases: allPhases,
	})
}

// TestConfigurationsAnswerAsKubeAPIServers compares every kind of authentication, authorization and admission under
// flags other than the default.
func TestConfigurationsAnswerAsKubeAPIServers(t *testing.T) {
	t.Parallel()
	configurations(t, options{
		out:  cmp.Or(os.Getenv("DIFFERENCES"), t.TempDir()),
		axes: cmp.Or(os.Getenv("AXES"), allAxes),
	})
}
