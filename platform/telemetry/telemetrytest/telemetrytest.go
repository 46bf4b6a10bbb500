// Package telemetrytest has helpers for tests of logs.
package telemetrytest

import (
	"os"
	"os/exec"
	"testing"
)

// InProcessOfItsOwn runs the test in another process, and returns true there. The test sets klog's logger, which the
// goroutines of other tests use.
func InProcessOfItsOwn(t *testing.T) bool {
	t.Helper()
	const key = "WATERSHED_TEST"
	if os.Getenv(key) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), key+"="+t.Name())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return false
}
