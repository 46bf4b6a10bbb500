// Command registry runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/registry"
)

func main() { process.Main(registry.Module) }
