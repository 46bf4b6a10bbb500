package features

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// A gate that nothing here knows is taken where it is kube-apiserver's, and refused in its words where it is nobody's.
func TestUnknownGatesAreRejected(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	AddFlag(fs, true)
	if err := fs.Set("feature-gates", "DynamicResourceAllocation=true, ConstrainedImpersonation=false"); err != nil {
		t.Error(err)
	}
	if err := fs.Set("feature-gates", "NoSuchGate=true"); err == nil ||
		!strings.Contains(err.Error(), "unrecognized feature gate: NoSuchGate") {
		t.Errorf("a gate of nobody's: %v", err)
	}
}
