// Command registry runs the registry service in a process of its own.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/registry"
)

func main() { process.Main(registry.Module) }
