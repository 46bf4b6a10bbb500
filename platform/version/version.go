// Package version is which Watershed, and which Kubernetes, a binary is.
package version

import (
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// Kubernetes is the release of Kubernetes that this is made of. A test holds it against the modules.
const Kubernetes = "v1.36.3"

// release is set when a binary is built by the Makefile.
var release string

// Release is the version of Watershed: what git describe says of the tree that the binary is built from, or the commit
// where the binary is built by go build alone.
func Release() string {
	if release != "" {
		return release
	}
	if c := commit(); c != "" {
		return c
	}
	return "development"
}

// commit is what go build knows of the tree; empty where it was not a checkout.
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

// Line is what `version` prints.
func Line(command string) string {
	text := command + " " + Release()
	if c := commit(); c != "" && c != Release() {
		text += ", commit " + c
	}
	return text + " (Kubernetes " + Kubernetes + ")"
}

// Metrics are the package's collectors: watershed_build_info, 1, whose labels are the versions.
func Metrics() []prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "watershed_build_info",
		Help:        "1; its labels are the versions of Watershed and of Kubernetes that this process is made of.",
		ConstLabels: prometheus.Labels{"version": Release(), "commit": commit(), "kubernetes": Kubernetes},
	})
	g.Set(1)
	return []prometheus.Collector{g}
}
