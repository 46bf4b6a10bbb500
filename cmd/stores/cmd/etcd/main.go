// Command etcd runs an etcd member as Watershed's other processes know it.
package main

import (
	"watershed.dev/cmd/stores"
	"watershed.dev/platform/process"
)

func main() { process.MainOf("etcd", stores.EtcdCommand) }
