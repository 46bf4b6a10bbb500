package features

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// An unknown gate is rejected with kube-apiserver's text.
func TestUnknownGatesAreRejected(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	AddFlag(fs)
	if err := fs.Set("feature-gates", "AllAlpha=false"); err != nil {
		t.Error(err)
	}
	if err := fs.Set("feature-gates", "NoSuchGate=true"); err == nil ||
		!strings.Contains(err.Error(), "unrecognized feature gate: NoSuchGate") {
		t.Errorf("an unknown gate: %v", err)
	}
}
