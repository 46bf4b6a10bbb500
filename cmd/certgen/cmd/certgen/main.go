// Command certgen creates and renews the certificates of a Watershed installation in the Secrets of its namespace.
package main

import (
	"watershed.dev/cmd/certgen"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("certgen", certgen.Command) }
