// Command nats runs NATS with JetStream as Watershed's other processes know it.
package main

import (
	"watershed.dev/cmd/stores"
	"watershed.dev/platform/process"
)

func main() { process.MainOf("nats", stores.NATSCommand) }
