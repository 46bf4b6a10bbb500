// Package version returns the versions of Watershed and Kubernetes of a binary.
package version

import (
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// Kubernetes is the Kubernetes release that Watershed implements. A test compares it with the modules.
const Kubernetes = "v1.36.3"

// release is set by the Makefile at build time.
var release string

// Release returns the version of Watershed: the output of git describe, or the commit if go build built the binary
// without the Makefile.
func Release() string {
	if release != "" {
		return release
	}
	if c := commit(); c != "" {
		return c
	}
	return "development"
}

// commit returns the commit that go build recorded, or nothing if the tree was not a checkout.
func commit() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" {
				return s.Value[:min(len(s.Value), 12)]
			}
		}
	}
	return ""
}

// Line returns the output of `version`.
func Line(command string) string {
	text := command + " " + Release()
	if c := commit(); c != "" && c != Release() {
		text += ", commit " + c
	}
	return text + " (Kubernetes " + Kubernetes + ")"
}

// Info holds the versions of a binary.
type Info struct {
	Version    string `json:"version"`
	Commit     string `json:"commit,omitempty"`
	Kubernetes string `json:"kubernetes"`
	Go         string `json:"go"`
	Platform   string `json:"platform"`
}

// Get returns the versions of the binary.
func Get() Info {
	return Info{Release(), commit(), Kubernetes, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
}

// Metrics returns the collectors of the package: watershed_build_info, always 1, with the versions as labels.
func Metrics() []prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "watershed_build_info",
		Help:        "Always 1, with the versions of Watershed and Kubernetes of this process as labels.",
		ConstLabels: prometheus.Labels{"version": Release(), "commit": commit(), "kubernetes": Kubernetes},
	})
	g.Set(1)
	return []prometheus.Collector{g}
}
