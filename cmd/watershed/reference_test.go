package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/certgen"
	"watershed.dev/cmd/embedded"
	"watershed.dev/cmd/xds"
)

var update = flag.Bool("update", false, "write docs/operators/configuration.md")

// flagSet is the flags of one command.
type flagSet struct {
	title, command string
	flags          *pflag.FlagSet
}

// flagSets returns the flags of every command. The first set has the flags that all services share.
func flagSets() []flagSet {
	newSet := func() *pflag.FlagSet { return pflag.NewFlagSet("", pflag.ContinueOnError) }
	shared := newSet()
	var services []flagSet
	for i, m := range modules {
		fs := newSet()
		p := newProcess([]string{m.Name})
		p.AddNetworkFlags(fs)
		p.AddFlags(fs)
		services = append(services, flagSet{"Flags of " + m.Name, "watershed " + m.Name, fs})
		if i == 0 {
			shared.AddFlagSet(fs)
		}
	}
	common := newSet()
	shared.VisitAll(func(f *pflag.Flag) {
		for _, s := range services {
			if s.flags.Lookup(f.Name) == nil {
				return
			}
		}
		common.AddFlag(f)
	})
	etcd, nats, x, certs := newSet(), newSet(), newSet(), newSet()
	(&embedded.Etcd{}).AddFlags(etcd)
	(&embedded.NATS{}).AddFlags(nats)
	(&xds.Config{}).AddFlags(x)
	(&certgen.Config{}).AddFlags(certs)
	split := newSplitFlags().FlagSet
	split.Lookup("rpc-network").DefValue = "unix on Linux, else tcp" // the page is the same on each system
	all := append([]flagSet{{"Flags of every service", "watershed SERVICE", common}}, services...)
	return append(all,
		flagSet{"Flags of up", "watershed up", newUpFlags().FlagSet},
		flagSet{"Flags of split", "watershed split", split},
		flagSet{"Flags of etcd", "watershed etcd", etcd},
		flagSet{"Flags of nats", "watershed nats", nats},
		flagSet{"Flags of xds", "watershed xds", x},
		flagSet{"Flags of certgen", "watershed certgen", certs})
}

// reference is the generated part of docs/operators/configuration.md. A flag of every service is listed once. up and
// split list only flags that no service describes in the same way.
func reference() string {
	var out bytes.Buffer
	sets := flagSets()
	listed := map[string]bool{} // lines of the services
	for i, set := range sets {
		fmt.Fprintf(&out, "## %s\n\n`%s` %s\n\n", set.title, set.command, introduction(i, set.command))
		service, all := i <= len(modules), set.command == "watershed up" || set.command == "watershed split"
		set.flags.VisitAll(func(f *pflag.Flag) {
			line := describe(f)
			common := i > 0 && service && sets[0].flags.Lookup(f.Name) != nil
			if f.Hidden || common || all && listed[line] {
				return
			}
			if service {
				listed[line] = true
			}
			out.WriteString(line)
		})
		out.WriteString("\n")
	}
	return out.String()
}

// introduction returns the first sentence of the i-th section of the reference.
func introduction(i int, command string) string {
	switch {
	case i == 0:
		return "has these flags. The sections of the services do not repeat them."
	case command == "watershed up":
		return "has the flags of all services, and these."
	case command == "watershed split":
		return fmt.Sprintf("has the flags of all services, and these. "+
			"It rejects `--%s`, and sets them for each process.", strings.Join(splitOnlyFlags, "`, `--"))
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
