// Command watchfanout runs the watchfanout service. It links no other service.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/watchfanout"
)

func main() { process.Main(watchfanout.Module) }
