//go:build tools

// Package jaeger names Jaeger's own command. It is a module of its own: its dependencies are its own.
package jaeger

import _ "github.com/jaegertracing/jaeger/cmd/all-in-one"
