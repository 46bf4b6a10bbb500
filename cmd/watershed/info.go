package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/version"
)

// flagValues are the values that the shell completes, by flag. A key with the name of a command before the flag wins.
var flagValues = map[string][]string{
	"logging-format": {"text", "json"},
	"output":         {"text", "json"},
	"version output": {"json", "yaml"},
	"placement":      placementNames(),
	"target":         modules.Names(),
}

// The arguments that the shell completes with names of files or directories (command.arguments).
const (
	fileArgument      = "FILE"
	directoryArgument = "DIRECTORY"
)

// completeArguments returns the function that completes the arguments of a command that are not flags.
func completeArguments(arguments string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch {
		case arguments == fileArgument && len(args) == 0:
			return nil, cobra.ShellCompDirectiveDefault
		case arguments == directoryArgument && len(args) == 0:
			return nil, cobra.ShellCompDirectiveFilterDirs
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

// versionCommand prints the versions of the binary.
func versionCommand(flags *pflag.FlagSet) func() error {
	output := flags.StringP("output", "o", "", `The output format: "json" or "yaml". Empty: a line.`)
	return func() error {
		text := []byte(version.Line("watershed") + "\n")
		var err error
		switch *output {
		case "":
		case "json":
			text, err = json.MarshalIndent(version.Get(), "", "  ")
			text = append(text, '\n')
		case "yaml":
			text, err = yaml.Marshal(version.Get())
		default:
			return fmt.Errorf(`--output %q: want "json" or "yaml"`, *output)
		}
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
		return err
	}
}

// manName is the name of the command that writes the manual pages.
const manName = "man"

// manCommand writes a manual page for each command into a directory.
func manCommand(flags *pflag.FlagSet) func() error {
	return func() error {
		if flags.NArg() != 1 {
			return fmt.Errorf("%d arguments: want the directory of the pages, as in watershed man share/man/man1",
				flags.NArg())
		}
		dir := flags.Arg(0)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		root := newRoot([]string{manName})
		root.DisableAutoGenTag = true // the pages of a version are the same on each day
		return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "Watershed " + version.Release()}, dir)
	}
}
