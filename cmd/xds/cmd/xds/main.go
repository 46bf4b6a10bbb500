// Command xds runs the xDS server that tells Watershed's processes where each service's replicas are.
package main

import (
	"fmt"
	"os"

	"watershed.dev/cmd/xds"
)

func main() {
	if err := xds.Command("xds", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "xds:", err)
		os.Exit(1)
	}
}
