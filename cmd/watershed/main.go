// Command watershed contains all of Watershed. It runs all services in a process (up), sets of services in processes of
// their own (split), any set (run) or a single service, and the tools of operators.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"watershed.dev/cmd/certgen"
	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/process"
	"watershed.dev/platform/version"
)

const usage = `watershed is the Kubernetes API server as services that scale independently.

  watershed up        run everything in this process
  watershed kube-apiserver
                      run everything in this process, with kube-apiserver's flags and defaults; a link to this binary
                      that is called kube-apiserver runs it too
  watershed split     run services in processes of their own on this machine: each, or by --placement=compact
  watershed split scale watchfanout=4
                      change the number of processes of a running split
  watershed run --target=gateway,authn
                      run any set of services: gateway, authn, authz, admission, registry and watchfanout
  watershed SERVICE   run one service
  watershed etcd      run an etcd member, as split does
  watershed nats      run a NATS server, as split does
  watershed xds       run the xDS server of the services' replicas, as split does
  watershed certgen   create and renew certificates and keys in the Secrets of a namespace
  watershed migrate   print a configuration for up from a cluster's kube-apiserver manifest
  watershed status    show the watch cache of a running Watershed
  watershed version   print the versions

Every command lists its flags with --help.
`

func main() {
	process.LimitMemory()
	if filepath.Base(os.Args[0]) == kubeAPIServerName {
		if err := kubeAPIServer(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, kubeAPIServerName+":", err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	command, args := os.Args[1], os.Args[2:]
	var err error
	switch command {
	case "up":
		err = up(args)
	case kubeAPIServerName:
		err = kubeAPIServer(args)
	case "split":
		err = split(args)
	case "run":
		err = run(args)
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
		if modules.Get(command) == nil {
			fmt.Fprintf(os.Stderr, "watershed: unknown command %q\n\n%s", command, usage)
			os.Exit(2)
		}
		err = runTargets([]string{command}, "watershed "+command, args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watershed "+command+":", err)
		os.Exit(1)
	}
}
