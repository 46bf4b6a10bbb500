// Command nats runs NATS with JetStream, with the configuration that Watershed's processes expect.
package main

import (
	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("nats", embedded.NATSCommand) }
