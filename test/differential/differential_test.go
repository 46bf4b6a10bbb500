package main

import (
	"cmp"
	"os"
	"testing"
)

// TestAnswersAreKubeAPIServers runs the short form of `make differential`: every phase, with fewer random steps.
func TestAnswersAreKubeAPIServers(t *testing.T) {
	run(t, options{
		seed:   7,
		steps:  1500,
		fuzz:   3,
		form:   "up",
		out:    t.TempDir(),
		phases: "create,verbs,paths,definitions,fixtures,fuzz,walk,remove,discovery",
	})
}

// TestConfigurationsAnswerAsKubeAPIServers compares every kind of authentication, authorization and admission under
// flags other than the default.
func TestConfigurationsAnswerAsKubeAPIServers(t *testing.T) {
	configurations(
		t,
		options{
			out:  cmp.Or(os.Getenv("DIFFERENCES"), t.TempDir()),
			axes: cmp.Or(os.Getenv("AXES"), "authn,authz,admission,audit"),
		},
	)
}
