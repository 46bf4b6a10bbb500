//go:build tools

// Package kubeburner names kube-burner. It is a module of its own: its dependencies are its own.
package kubeburner

import _ "github.com/kube-burner/kube-burner/v2/cmd/kube-burner"
