// Command xds runs the xDS server that tells Watershed's processes where each service's replicas are.
package main

import (
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("xds", xds.Command) }
