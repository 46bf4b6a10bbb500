// Command admission runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/admission"
)

func main() { process.Main(admission.Module) }
