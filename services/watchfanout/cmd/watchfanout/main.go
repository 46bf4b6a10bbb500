// Command watchfanout runs the service of that name, and holds nothing of the others.
package main

import (
	"watershed.dev/platform/process"
	"watershed.dev/services/watchfanout"
)

func main() { process.Main(watchfanout.Module) }
