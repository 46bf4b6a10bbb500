package eventlog

import "testing"

func TestOldServersAreRefused(t *testing.T) {
	for server, want := range map[string]bool{
		"2.15.2":   false,
		"2.15.3":   false,
		"2.16.0":   false,
		"2.15.1":   true,
		"2.12.9":   true,
		"2.10.0":   true,
		"nonsense": true,
	} {
		if got := tooOld(server); got != want {
			t.Errorf("%s is too old: %v", server, got)
		}
	}
}
