// Package kubeversion is the version of Kubernetes that is served.
package kubeversion

import (
	"runtime/debug"
	"strings"

	apimachineryversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/util/compatibility"
	componentversion "k8s.io/component-base/version"

	"watershed.dev/platform/version"
)

// Info is the version as /version tells it. A binary that was built without the Makefile's flags, by go build or go
// install, knows its version all the same.
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

// stamped says whether a version was set when the binary was built.
func stamped(v string) bool { return !strings.HasPrefix(v, "v0.0.0") }
