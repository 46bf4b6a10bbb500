// Command etcd runs an etcd member as Watershed's other processes know it.
package main

import (
	"fmt"
	"os"

	"watershed.dev/cmd/stores"
)

func main() {
	if err := stores.EtcdCommand("etcd", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		os.Exit(1)
	}
}
