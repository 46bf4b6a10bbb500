// Command authn runs the authn service. It links no other service.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/authn"
)

func main() { process.Main(authn.Module) }
