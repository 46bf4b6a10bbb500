package main

import "testing"

// TestMasks checks that a mask is not applied to a random value that looks like another kind of value.
func TestMasks(t *testing.T) {
	for is, want := range map[string]string{
		"kube-api-access-2zh9s": "kube-api-access-RANDOM",
		"kube-api-access-2477s": "kube-api-access-RANDOM",
		"who-2477s":             "who-RANDOM",
	} {
		if got := mask(is); got != want {
			t.Errorf("%s is masked as %s, not %s", is, got, want)
		}
	}
}

// TestDurationsDifferLittle checks that an age may differ by the start of the servers, and nothing else may.
func TestDurationsDifferLittle(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"5s", "19s", true}, {"1m5s", "70s", true}, {"30s", "151s", false}, {"9m0s", "8m20s", true},
		{"a 5s b", "a 6s c", false}, {"5s", "", false}, {"5", "6", false}, {"5s", "5s 5s", false},
		{"2m", "114s", true}, {"3m", "2m50s", true}, {"2m", "5m", false}, {"9m58s", "10m", true}, {"50m", "55m", false}, {"100m", "101m", false},
	} {
		if sameText(c.a, c.b) != c.same {
			t.Errorf("%q and %q: want %v", c.a, c.b, c.same)
		}
	}
}
