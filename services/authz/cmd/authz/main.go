// Command authz runs the authz service. It links no other service.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/authz"
)

func main() { process.Main(authz.Module) }
