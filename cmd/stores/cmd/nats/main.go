// Command nats runs NATS with JetStream as Watershed's other processes know it.
package main

import (
	"fmt"
	"os"

	"watershed.dev/cmd/stores"
)

func main() {
	if err := stores.NATSCommand("nats", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "nats:", err)
		os.Exit(1)
	}
}
