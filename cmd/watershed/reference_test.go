package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write docs/operators/configuration.md")

// flagSet is the flags of one command.
type flagSet struct {
	title, command string
	flags          *pflag.FlagSet
}

// notListed are the flags and commands that the page describes in its introduction.
var notListed = []string{"config", "help", "help-all", "target", "run", kubeAPIServerName}

// flagSets returns the flags of every command. The first set has the flags that all services share.
func flagSets() []flagSet {
	root := newRoot([]string{manName})
	var services, others []flagSet
	for _, c := range commands(nil) {
		cmd, _, _ := root.Find(strings.Fields(c.name))
		switch set := (flagSet{"Flags of " + c.name, "watershed " + c.name, cmd.Flags()}); {
		case slices.Contains(notListed, c.name):
		case modules.Get(c.name) != nil:
			services = append(services, set)
		default:
			others = append(others, set)
		}
	}
	common := pflag.NewFlagSet("", pflag.ContinueOnError)
	services[0].flags.VisitAll(func(f *pflag.Flag) {
		if !slices.ContainsFunc(services, func(s flagSet) bool { return s.flags.Lookup(f.Name) == nil }) {
			common.AddFlag(f)
		}
	})
	split, _, _ := root.Find([]string{"split"})
	split.Flags().Lookup("rpc-network").DefValue = "unix on Linux, else tcp" // the page is the same on each system
	return slices.Concat([]flagSet{{"Flags of every service", "watershed SERVICE", common}}, services, others)
}

// reference is the generated part of docs/operators/configuration.md. A flag of every service is listed once. up and
// split list only flags that no service describes in the same way.
func reference() string {
	var out bytes.Buffer
	sets := flagSets()
	listed := map[string]bool{} // lines of the services
	for i, set := range sets {
		var lines strings.Builder
		service, all := i <= len(modules), set.command == "watershed up" || set.command == "watershed split"
		set.flags.VisitAll(func(f *pflag.Flag) {
			line := describe(f)
			common := i > 0 && service && sets[0].flags.Lookup(f.Name) != nil
			if f.Hidden || slices.Contains(notListed, f.Name) || common || all && listed[line] {
				return
			}
			if service {
				listed[line] = true
			}
			lines.WriteString(line)
		})
		if lines.Len() > 0 {
			fmt.Fprintf(&out, "## %s\n\n`%s` %s\n\n%s\n", set.title, set.command, introduction(i, set.command), &lines)
		}
	}
	return out.String()
}

// networkFlags names the flags of `watershed run` that the other commands set by themselves.
const networkFlags = "those of a process's network (`--rpc-…`, `--xds-…`, `--registry-addresses`, " +
	"`--drain-timeout`, `--target`)"

// introduction returns the first sentence of the i-th section of the reference.
func introduction(i int, command string) string {
	switch {
	case i == 0:
		return "has these flags. The sections of the services do not repeat them."
	case command == "watershed up":
		return "has the flags of all services, without " + networkFlags + ", and these."
	case command == "watershed split":
		return fmt.Sprintf("has the flags of all services, without %s, and these. It rejects `--%s`, and sets them for each "+
			"process.", networkFlags, strings.Join(splitOnlyFlags, "`, `--"))
	}
	return "has these flags."
}

// describe returns the line of a flag in the reference.
func describe(f *pflag.Flag) string {
	standard := ""
	if f.DefValue != "" && f.DefValue != "[]" {
		standard = fmt.Sprintf(", default `%s`", f.DefValue)
	}
	usage := strings.Join(strings.Fields(f.Usage), " ")
	return fmt.Sprintf("- `--%s` (%s%s): %s\n", f.Name, f.Value.Type(), standard, usage)
}

// TestTheConfigurationReference compares docs/operators/configuration.md with the flags. -update writes it.
func TestTheConfigurationReference(t *testing.T) {
	const begin, end = "<!-- generated -->\n", "<!-- /generated -->"
	page := filepath.Join("..", "..", "docs", "operators", "configuration.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no generated part", page)
	}
	want := head + begin + reference() + end + tail
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(text) != want {
		t.Errorf("%s is older than the flags: run `make docs`", page)
	}
}
