// Command gateway runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/gateway"
)

func main() { process.Main(gateway.Module) }
