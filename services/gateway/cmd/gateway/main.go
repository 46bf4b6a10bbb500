// Command gateway runs the gateway service and no other service.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/gateway"
)

func main() { process.Main(gateway.Module) }
