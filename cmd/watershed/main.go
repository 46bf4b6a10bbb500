// Command watershed is every part of Watershed: all of it in one process (up), each service in a process of its own
// (split, or a service's name), and the operator's tools.
package main

import (
	"fmt"
	"os"
	_ "time/tzdata" // CronJobs name time zones

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

const usage = `watershed is the Kubernetes API server as services that scale apart.

  watershed up        everything in this process, on this machine
  watershed split     every service as a process of its own, on this machine
  watershed SERVICE   one service: gateway, authn, authz, admission, registry or watchfanout
  watershed etcd      an etcd member, as split runs it
  watershed nats      a NATS server, as split runs it
  watershed status    the watch tier of a running Watershed
  watershed version

Every command says what it can be told with --help.
`

// Upstream's controllers end the process when they panic, and what is in etcd can make them: a CRD whose name has no
// dot does. Their workers run under wait.Until, which starts a worker again that has panicked.
func init() { utilruntime.ReallyCrash = false }

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	command, args := os.Args[1], os.Args[2:]
	var err error
	switch command {
	case "up":
		err = up(args)
	case "split":
		err = split(args)
	case "etcd":
		err = etcdCommand(args)
	case "nats":
		err = natsCommand(args)
	case "status":
		err = statusCommand(args)
	case "version":
		fmt.Println(versionLine())
	case "help", "-h", "--help":
		fmt.Print(usage)
	default:
		m := moduleOf(command)
		if m == nil {
			fmt.Fprintf(os.Stderr, "watershed: unknown command %q\n\n%s", command, usage)
			os.Exit(2)
		}
		err = serviceCommand(m, args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watershed "+command+":", err)
		os.Exit(1)
	}
}
