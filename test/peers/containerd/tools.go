//go:build tools

// Package containerd names containerd's own commands. It is a module of its own: containerd's dependencies are newer
// than Kubernetes' in places.
package containerd

import (
	_ "github.com/containerd/containerd/v2/cmd/containerd"
	_ "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"
	_ "github.com/containerd/containerd/v2/cmd/ctr"
)
