//go:build tools

// Package dex names dex' own command. It is a module of its own: its dependencies are its own.
package dex

import _ "github.com/dexidp/dex/cmd/dex"
