// Package kubeversion returns the served version of Kubernetes.
package kubeversion

import (
	"runtime/debug"
	"strings"

	apimachineryversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/util/compatibility"
	componentversion "k8s.io/component-base/version"

	"watershed.dev/platform/version"
)

// Info returns the version that /version serves. A binary that go build or go install built without the Makefile's
// flags has its version too.
func Info() *apimachineryversion.Info {
	info := compatibility.DefaultBuildEffectiveVersion().Info()
	if stamped(componentversion.Get().GitVersion) {
		return info
	}
	info.GitVersion = version.Kubernetes
	parts := strings.SplitN(strings.TrimPrefix(version.Kubernetes, "v"), ".", 3)
	info.Major, info.Minor = parts[0], parts[1]
	info.GitCommit, info.GitTreeState, info.BuildDate = "", "", "1970-01-01T00:00:00Z"
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return info
	}
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			info.GitCommit = s.Value
		case "vcs.modified":
			info.GitTreeState = map[string]string{"true": "dirty", "false": "clean"}[s.Value]
		case "vcs.time":
			info.BuildDate = s.Value
		}
	}
	return info
}

// stamped returns true if linker flags set the version at build time.
func stamped(v string) bool { return !strings.HasPrefix(v, "v0.0.0") }
