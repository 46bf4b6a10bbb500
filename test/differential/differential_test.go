package main

import "testing"

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
