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
	up, etcd, nats, x, certs := newUpFlags().FlagSet, newSet(), newSet(), newSet(), newSet()
	(&embedded.Etcd{}).AddFlags(etcd)
	(&embedded.NATS{}).AddFlags(nats)
	(&xds.Config{}).AddFlags(x)
	(&certgen.Config{}).AddFlags(certs)
	all := append([]flagSet{{"Flags of every service", "watershed SERVICE", common}}, services...)
	return append(all,
		flagSet{"Flags of up", "watershed up", up},
		flagSet{"Flags of etcd", "watershed etcd", etcd},
		flagSet{"Flags of nats", "watershed nats", nats},
		flagSet{"Flags of xds", "watershed xds", x},
		flagSet{"Flags of certgen", "watershed certgen", certs})
}

// reference is the generated part of docs/operators/configuration.md. A flag of every service is listed once, and up
// lists only flags that no service has.
func reference() string {
	var out bytes.Buffer
	sets := flagSets()
	listed := map[string]bool{}
	for i, set := range sets {
		fmt.Fprintf(&out, "## %s\n\n`%s`", set.title, set.command)
		switch {
		case i == 0:
			out.WriteString(" has these flags, whatever the service.\n\n")
		case set.command == "watershed up":
			out.WriteString(" has the flags of all services, and these.\n\n")
		default:
			out.WriteString(" has these flags.\n\n")
		}
		set.flags.VisitAll(func(f *pflag.Flag) {
			common := i > 0 && i <= len(modules) && sets[0].flags.Lookup(f.Name) != nil
			if f.Hidden || common || set.command == "watershed up" && listed[f.Name] {
				return
			}
			listed[f.Name] = true
			fmt.Fprintf(&out, "- `--%s` (%s", f.Name, f.Value.Type())
			if f.DefValue != "" && f.DefValue != "[]" {
				fmt.Fprintf(&out, ", default `%s`", f.DefValue)
			}
			fmt.Fprintf(&out, "): %s\n", strings.Join(strings.Fields(f.Usage), " "))
		})
		out.WriteString("\n")
	}
	return out.String()
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
