// Command xds runs the xDS server that publishes the replicas of each service.
package main

import (
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("xds", xds.Command) }
