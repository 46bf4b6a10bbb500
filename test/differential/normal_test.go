package main

import "testing"

// TestMasks checks that a mask is not applied to a random value that looks like another kind of value.
func TestMasks(t *testing.T) {
	for is, want := range map[string]string{
		"kube-api-access-2zh9s": "kube-api-access-RANDOM",
		"kube-api-access-2477s": "kube-api-access-RANDOM",
		"who-2477s":             "who-RANDOM",
		"2477s":                 "AGE",
		"5m3s":                  "AGE",
	} {
		if got := mask(is); got != want {
			t.Errorf("%s is masked as %s, not %s", is, got, want)
		}
	}
}
