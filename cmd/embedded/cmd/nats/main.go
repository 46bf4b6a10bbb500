// Command nats runs NATS with JetStream as Watershed's other processes know it.
package main

import (
	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("nats", embedded.NATSCommand) }
