package main

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// commonFlags are the flags in the help of commands with the flags of services. --help-all lists all.
var commonFlags = []string{"target", "placement", "replicas", "data-dir", "config", "bind-address", "secure-port",
	"tls-sans", "etcd-servers", "nats-url", "service-cluster-ip-range", "runtime-config", "audit-policy-file",
	"with-controllers", "v", "rpc-address", "rpc-cert-file", "xds-servers", "kubeconfig", "help", "help-all"}

// ownGroups maps patterns (path.Match) to the groups of the flags that kube-apiserver does not have. The first match
// counts.
var ownGroups = []struct{ group, patterns string }{
	{"data directory", "data-dir tls-sans log-file-*"},
	{"processes", "placement replicas dry-run rpc-network target"},
	{"controllers", "*controllers* fake-nodes"},
	{"watch cache", "watch-* cache-* compressed-* max-watch-*"},
	{"event log", "nats-* log-*"},
	{"services", "rpc-* xds-* *-addresses services-* kubeconfig drain-* policy-*"},
	{"metrics", "debug-address health-address"},
	{"features", "console"},
	{"auditing", "audit-*"},
	{"authentication", "authentication-* basic-auth-*"},
	{"admission", "webhook-* default-*"},
	{"traces", "tracing-*"},
	{"generic", "max-*"},
	{"global", "*"},
}

// flagGroups returns the visible flags in groups: the groups of kube-apiserver, and then Watershed's own.
func flagGroups(flags *pflag.FlagSet) (groups cliflag.NamedFlagSets) {
	upstream := options.NewServerRunOptions().Flags()
	groupOf := map[string]string{}
	for _, group := range upstream.Order {
		groups.FlagSet(group)
		upstream.FlagSets[group].VisitAll(func(f *pflag.Flag) { groupOf[f.Name] = group })
	}
	for _, own := range ownGroups {
		groups.FlagSet(own.group)
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		i := slices.IndexFunc(ownGroups, func(own struct{ group, patterns string }) bool {
			return slices.ContainsFunc(strings.Fields(own.patterns), func(pattern string) bool {
				matches, _ := path.Match(pattern, f.Name)
				return matches
			})
		})
		groups.FlagSet(cmp.Or(groupOf[f.Name], ownGroups[i].group)).AddFlag(f)
	})
	return groups
}

// manyFlags is the number of flags from which a command's help is short.
const manyFlags = 40

// groupHelp makes the help of a command with many flags short, and adds --help-all. The help of kube-apiserver has all
// flags, as upstream's.
func groupHelp(cmd *cobra.Command) (all *bool) {
	all = new(bool)
	switch flags := cmd.Flags(); {
	case cmd.Name() == kubeAPIServerName:
		cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) { printGroups(cmd) })
	case visible(flags) > manyFlags:
		flags.BoolVar(all, "help-all", false, "Help with every flag, in groups.")
		cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) { printCommon(cmd) })
	default:
		cmd.SetHelpFunc(new(cobra.Command).HelpFunc()) // not the parent's
	}
	return all
}

// visible returns the number of flags in a help text.
func visible(flags *pflag.FlagSet) (n int) {
	flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			n++
		}
	})
	return n
}

// printGroups prints the help of a command with every flag.
func printGroups(cmd *cobra.Command) { printHelp(cmd, flagGroups(cmd.Flags())) }

// printCommon prints the help of a command with the common flags, and the groups of the others.
func printCommon(cmd *cobra.Command) {
	var common cliflag.NamedFlagSets
	for _, name := range commonFlags {
		if f := cmd.Flags().Lookup(name); f != nil && !f.Hidden {
			common.FlagSet("common").AddFlag(f)
		}
	}
	printHelp(cmd, common)
	groups := flagGroups(cmd.Flags())
	var counts []string
	for _, name := range groups.Order {
		if n := visible(groups.FlagSets[name]); n > 0 {
			counts = append(counts, fmt.Sprintf("%s (%d)", name, n))
		}
	}
	fmt.Fprintf(cmd.OutOrStdout(), "\n--help-all lists all %d flags, in groups:\n  %s\n", visible(cmd.Flags()),
		strings.Join(counts, ", "))
}

func printHelp(cmd *cobra.Command, groups cliflag.NamedFlagSets) {
	w := cmd.OutOrStdout()
	columns := 0 // unlimited
	if size, err := unix.IoctlGetWinsize(int(os.Stdout.Fd()), unix.TIOCGWINSZ); err == nil && w == os.Stdout {
		columns = int(size.Col)
	}
	fmt.Fprintf(w, "%s.\n\nUsage:\n  %s\n", cmd.Short, cmd.UseLine())
	cliflag.PrintSections(w, groups, columns)
}
