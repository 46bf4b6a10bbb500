//go:build tools

// Package helm names Helm's command. It is a module of its own: its dependencies are its own.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
