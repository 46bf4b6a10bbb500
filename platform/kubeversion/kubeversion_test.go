package kubeversion

import (
	"os"
	"strings"
	"testing"

	"watershed.dev/platform/version"
)

// A test binary has no linker flags, like a binary of go build.
func TestAPlainBuildKnowsItsVersion(t *testing.T) {
	if i := Info(); i.GitVersion != version.Kubernetes || i.Major != "1" || i.Minor != "36" {
		t.Errorf("%+v", i)
	}
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "k8s.io/apiserver v0" + strings.TrimPrefix(version.Kubernetes, "v1"); !strings.Contains(
		string(mod),
		want,
	) {
		t.Errorf("go.mod does not have %s", want)
	}
}
