// Command authz runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/authz"
)

func main() { process.Main(authz.Module) }
