// Command watershed contains all of Watershed. It runs all services in a process (up), sets of services in processes of
// their own (split), any set (run) or a single service, and the tools of operators.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"watershed.dev/cmd/certgen"
	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/watershed/capacity"
	"watershed.dev/cmd/watershed/probe"
	"watershed.dev/cmd/watershed/snapshot"
	"watershed.dev/cmd/xds"
	"watershed.dev/platform/config"
	"watershed.dev/platform/process"
	"watershed.dev/platform/version"
)

// command is a line of the table of commands.
type command struct {
	// name is the name. A subcommand has the name of its command before its own.
	name string
	// arguments describes the arguments that are not flags. Empty: the command has none.
	arguments string
	// group is the group of the command in the list of commands.
	group, short string
	process.Command
}

// The groups of commands.
const (
	whole = "The API server:"
	parts = "Parts of it, each in a process:"
	tools = "Tools:"
)

// commands returns the table of commands. The target of `run` is in args.
func commands(args []string) []command {
	all := []command{
		{"up", "", whole, "Run everything in this process", up},
		kubeAPIServerCommand,
		{"split", "", whole, "Run the services in processes of their own on this machine", split},
		{"split scale", "NAME=NUMBER...", "", "Change the number of processes of a running split", scaleCommand},
		{"run", "", parts, "Run any set of services: --target=gateway,authn", runCommand(args)},
	}
	for _, m := range modules {
		all = append(all, command{m.Name, "", parts, "Run the service " + m.Name,
			modules.Command([]string{m.Name}, disableAnonymous)})
	}
	return append(all,
		command{"etcd", "", parts, "Run an etcd member, as split does", embedded.EtcdCommand},
		command{"nats", "", parts, "Run a NATS server, as split does", embedded.NATSCommand},
		command{"xds", "", parts, "Run the xDS server of the services' replicas, as split does", xds.Command},
		command{"status", "", tools, "Show the processes and stores of a running Watershed", statusCommand},
		command{"check", "", tools, "Find faults of a running Watershed, or before an installation", checkCommand(args)},
		command{"probe", "", tools, "Write and watch as a client does, and measure it", probe.Command},
		command{"capacity", "", tools, "Compute the processes that a cluster needs", capacity.Command},
		command{"snapshot", "save|restore FILE", tools, "Save and restore etcd", snapshot.Command},
		command{"snapshot save", fileArgument, "", "Save a snapshot of etcd", snapshot.SaveCommand},
		command{"snapshot restore", fileArgument, "", "Restore a snapshot of etcd (-: standard input)",
			snapshot.RestoreCommand},
		command{"migrate", "", tools, "Print a configuration for up from kube-apiserver's manifest", migrateCommand},
		command{"certgen", "", tools, "Create and renew certificates in the Secrets of a namespace", certgen.Command},
		command{"version", "", tools, "Print the versions", versionCommand},
		command{manName, directoryArgument, tools, "Write the manual pages", manCommand},
	)
}

// newRoot returns the tree of commands for a command line. Only the commands that args name have flags, because the
// services' options are large. Every command has flags if args name the command man.
func newRoot(args []string) *cobra.Command {
	cobra.EnableCommandSorting = false
	root := newCommand(command{name: "watershed", short: "The Kubernetes API server as services that scale separately"})
	root.Version = version.Line(root.Name())
	root.SetVersionTemplate("{{.Version}}\n")
	for _, group := range []string{whole, parts, tools} {
		root.AddGroup(&cobra.Group{ID: group, Title: group})
	}
	for _, c := range commands(args) {
		path := strings.Fields(c.name)
		cmd := newCommand(c)
		cmd.Run = func(*cobra.Command, []string) {} // a command without flags is only listed
		if slices.Contains(args, path[0]) || slices.Contains(args, manName) {
			declare(cmd, c)
		}
		parent, _, _ := root.Find(path[:len(path)-1])
		parent.AddCommand(cmd)
	}
	root.SetHelpCommandGroupID(tools)
	root.SetCompletionCommandGroupID(tools)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	// cobra's commands do not fail if the arguments are wrong
	for name, run := range map[string]func(cmd *cobra.Command, args []string) error{
		"help": func(_ *cobra.Command, args []string) error {
			cmd, _, err := root.Find(args)
			if err != nil {
				return err
			}
			cmd.InitDefaultHelpFlag()
			return cmd.Help()
		},
		"completion": func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	} {
		cmd, _, _ := root.Find([]string{name})
		cmd.RunE = run
	}
	return root
}

// newCommand returns a command without flags, whose errors name flags as the services' programs do.
func newCommand(c command) *cobra.Command {
	name := c.name[strings.LastIndex(c.name, " ")+1:]
	cmd := &cobra.Command{
		Use:           strings.TrimSpace(name + " " + c.arguments),
		Short:         c.short,
		GroupID:       c.group,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		err = config.FlagError(cmd.Flags(), err)
		if cmd.Flags().Lookup("target") != nil {
			err = modules.FlagError(err)
		}
		return err
	})
	return cmd
}

// declare adds the flags of c to cmd, and runs c once they have their values.
func declare(cmd *cobra.Command, c command) {
	flags := cmd.Flags()
	flags.SetOutput(os.Stderr) // of warnings about deprecated flags, also from a file
	run := c.Command(flags)
	config.AddFlag(flags)
	helpAll := groupHelp(cmd)
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if c.arguments != "" {
			return nil
		}
		return config.NoArguments(args)
	}
	cmd.ValidArgsFunction = completeArguments(c.arguments)
	for name, values := range flagValues {
		if own, ok := flagValues[c.name+" "+name]; ok {
			values = own
		}
		if flags.Lookup(name) != nil {
			_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
		}
	}
	cmd.RunE = func(*cobra.Command, []string) error {
		if *helpAll {
			printGroups(cmd)
			return nil
		}
		if err := config.Complete(flags); err != nil {
			return err
		}
		return run()
	}
}

// newProgram returns the command of a binary or link with a name.
func newProgram(name string, args []string) *cobra.Command {
	if name != kubeAPIServerName {
		return newRoot(args)
	}
	c := kubeAPIServerCommand
	c.group = ""
	cmd := newCommand(c)
	declare(cmd, c)
	return cmd
}

// execute runs the command that args name. The error is a line with the name of the command.
func execute(program string, args []string) error {
	root := newProgram(program, args)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	if err == nil {
		return nil
	}
	text, suggestions, _ := strings.Cut(err.Error(), "\n\nDid you mean this?\n")
	if names := strings.Fields(suggestions); len(names) > 0 {
		err = fmt.Errorf("%s (did you mean %q?)", text, nearest(text, names))
	}
	return fmt.Errorf("%s: %s", cmd.CommandPath(), process.ErrorLine(err))
}

// nearest returns the name with the longest common prefix with the command that the text of an error quotes.
func nearest(text string, names []string) string {
	_, unknown, _ := strings.Cut(text, `"`)
	common := func(name string) (n int) {
		for n < min(len(name), len(unknown)) && name[n] == unknown[n] {
			n++
		}
		return n
	}
	return slices.MaxFunc(names, func(a, b string) int { return common(a) - common(b) })
}

func main() {
	process.LimitMemory()
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // until a process sets up its log; tools print their errors
	if err := execute(filepath.Base(os.Args[0]), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
