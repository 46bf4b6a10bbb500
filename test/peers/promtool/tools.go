//go:build tools

// Package promtool names Prometheus' promtool. It is a module of its own: its dependencies are its own.
package promtool

import _ "github.com/prometheus/prometheus/cmd/promtool"
