// Command authn runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/authn"
)

func main() { process.Main(authn.Module) }
