// Command admission runs the admission service. It links no other service.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/admission"
)

func main() { process.Main(admission.Module) }
