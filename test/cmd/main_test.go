package main

import (
	"slices"
	"strings"
	"testing"
)

func TestTheOutputOfScriptsHasResults(t *testing.T) {
	results, err := parse(strings.NewReader(`+++ Running case: test-cmd.record_command_canary
+++ exit code: 1
+++ Running case: test-cmd.run_a_tests
core.sh:10: Successful get pods {{.}}: x
` + "\x1b[32mSuccessful\n" + `message:Successful is not an assertion+++ exit code: 0
Successful
+++ Running case: test-cmd.run_b_tests
+++ exit code: 1
+++ Running case: test-cmd.run_c_tests
Successful
`))
	want := []result{{"run_a_tests", true, 2}, {"run_b_tests", false, 0}, {"run_c_tests", false, 1}}
	if err != nil || !slices.Equal(results, want) {
		t.Errorf("%v %v", results, err)
	}
}

func TestASecondRunReplacesFailures(t *testing.T) {
	results := []result{{"run_a_tests", false, 2}, {"run_b_tests", true, 1}, {"c_test", false, 1}, {"run_d_tests", false, 0}}
	if got := again(results); got != "a d" {
		t.Errorf("%q run again", got)
	}
	replace(results, []result{{"run_a_tests", true, 3}, {"run_d_tests", false, 1}})
	want := []result{{"run_a_tests", true, 3}, {"run_b_tests", true, 1}, {"c_test", false, 1}, {"run_d_tests", false, 1}}
	if !slices.Equal(results, want) {
		t.Errorf("got %v, want %v", results, want)
	}
}

func TestFewerAssertionsAreAProblem(t *testing.T) {
	theirs := []result{{"a", true, 2}, {"b", false, 1}}
	for want, ours := range map[string][]result{
		"":                 {{"a", true, 2}, {"b", false, 1}},
		"a: passes":        {{"a", false, 2}, {"b", true, 1}},
		"a: 1 assertions":  {{"a", true, 1}, {"b", true, 2}},
		"b: did not run":   {{"a", true, 2}},
		"b: 0 assertions,": {{"a", true, 2}, {"b", false, 0}},
	} {
		err := compare(theirs, ours)
		if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}
