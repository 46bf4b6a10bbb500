// Command etcd runs an etcd member as Watershed's other processes know it.
package main

import (
	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/process"
)

func main() { process.CommandMain("etcd", embedded.EtcdCommand) }
