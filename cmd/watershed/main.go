// Command watershed is every part of Watershed: all of it in one process (up), each service in a process of its own
// (split, or a service's name), and the operator's tools.
package main

import (
	"fmt"
	"os"

	"watershed.dev/cmd/certgen"
	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/process"
	"watershed.dev/platform/version"
)

const usage = `watershed is the Kubernetes API server as services that scale apart.

  watershed up        everything in this process, on this machine
  watershed split     every service as a process of its own, on this machine
  watershed split scale watchfanout=4
                      more or fewer processes of a service, while split runs
  watershed SERVICE   one service: gateway, authn, authz, admission, registry or watchfanout
  watershed etcd      an etcd member, as split runs it
  watershed nats      a NATS server, as split runs it
  watershed xds       where the replicas of each service are, as split runs it
  watershed certgen   certificates and keys, in the Secrets of a namespace
  watershed migrate   settings for up that are those of a cluster's kube-apiserver
  watershed status    the watch tier of a running Watershed
  watershed version

Every command says what it can be told with --help.
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	process.PaceGC()
	command, args := os.Args[1], os.Args[2:]
	var err error
	switch command {
	case "up":
		err = up(args)
	case "split":
		err = split(args)
	case "etcd":
		err = embedded.EtcdCommand("watershed etcd", args)
	case "nats":
		err = embedded.NATSCommand("watershed nats", args)
	case "certgen":
		err = certgen.Command("watershed certgen", args)
	case "xds":
		err = xds.Command("watershed xds", args)
	case "migrate":
		err = migrateCommand(args)
	case "status":
		err = statusCommand(args)
	case "version", "--version":
		fmt.Println(version.Line("watershed"))
	case "help", "-h", "--help":
		fmt.Print(usage)
	default:
		m := moduleOf(command)
		if m == nil {
			fmt.Fprintf(os.Stderr, "watershed: unknown command %q\n\n%s", command, usage)
			os.Exit(2)
		}
		err = process.Run(m, "watershed "+m.Name, args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watershed "+command+":", err)
		os.Exit(1)
	}
}
