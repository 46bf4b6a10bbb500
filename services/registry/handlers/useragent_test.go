package handlers

import (
	"strings"
	"testing"
)

// A field manager's name from the user agent has at most 128 bytes and no partial rune.
func TestAFieldManagersNameIsBounded(t *testing.T) {
	for agent, want := range map[string]string{
		strings.Repeat("x", 500) + "/v1": strings.Repeat("x", 128),
		strings.Repeat("é", 500):         strings.Repeat("é", 64),
		"x" + strings.Repeat("é", 500):   "x" + strings.Repeat("é", 63),
		"kube\x00ctl/v1":                 "kubectl",
	} {
		if got := managerOrUserAgent("", agent); got != want {
			t.Errorf("%q: %q", agent, got)
		}
	}
}
