// Command etcd runs an etcd member with the configuration that Watershed's processes expect.
package main

import (
	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("etcd", embedded.EtcdCommand) }
