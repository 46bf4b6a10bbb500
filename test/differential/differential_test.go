package main

import (
	"cmp"
	"os"
	"testing"
)

// The short form of `make differential`: everything once, and fewer steps at random.
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

// Every way to be known, to be allowed and to be admitted, under flags other than the default.
func TestConfigurationsAnswerAsKubeAPIServers(t *testing.T) {
	configurations(
		t,
		options{
			out:  cmp.Or(os.Getenv("DIFFERENCES"), t.TempDir()),
			axes: cmp.Or(os.Getenv("AXES"), "authn,authz,admission,audit"),
		},
	)
}
