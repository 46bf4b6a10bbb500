package check

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
)

// Flags are the flags of the command.
type Flags struct {
	Options
	Output inspect.Output
	FailOn string

	// all has the flags of `up` too, for --pre.
	all *pflag.FlagSet
}

// AddFlags adds every flag to fs.
func (f *Flags) AddFlags(fs *pflag.FlagSet) {
	f.all = fs
	f.Options.AddFlags(fs)
	f.Output.AddFlag(fs)
	fs.StringVar(&f.FailOn, "fail-on", Error.String(),
		`The least level that ends with exit code 1: "warning" or "error".`)
}

// Command runs the checks and prints the findings. It fails if a finding has the level of --fail-on.
func Command(fs *pflag.FlagSet) func() error {
	f := &Flags{}
	f.AddFlags(fs)
	return func() error {
		ctx, cancel := lifecycle.SignalContext()
		defer cancel()
		worst, err := f.run(ctx, os.Stdout)
		if err == nil && worst >= Level(slices.Index(levels, f.FailOn)) {
			err = fmt.Errorf("a finding has the level %s", worst)
		}
		return err
	}
}

// run prints the findings, and returns the highest level.
func (f *Flags) run(ctx context.Context, w io.Writer) (Level, error) {
	if err := f.Output.Validate(); err != nil {
		return OK, err
	}
	if f.FailOn != Warning.String() && f.FailOn != Error.String() {
		return OK, fmt.Errorf(`--fail-on %q: want "warning" or "error"`, f.FailOn)
	}
	all, err := f.find(ctx)
	if err != nil {
		return OK, err
	}
	sortFindings(all)
	if f.Output.IsJSON() {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return Worst(all), e.Encode(map[string]any{"findings": all})
	}
	Print(w, all)
	return Worst(all), nil
}

// find reads the state and returns the findings.
func (f *Flags) find(ctx context.Context) ([]Finding, error) {
	if f.Pre {
		in, err := f.ReadPre(ctx, f.all)
		if err != nil {
			return nil, err
		}
		return FindPre(in), nil
	}
	in, err := f.Read(ctx)
	if err != nil {
		return nil, err
	}
	return Find(in), nil
}

// Print writes a line for each finding, and a summary.
func Print(w io.Writer, all []Finding) {
	count := map[Level]int{}
	for _, x := range all {
		count[x.Level]++
		line := fmt.Sprintf("%-8s%-13s%s", x.Level, x.Check, x.Problem)
		if x.Remedy != "" {
			line += ". " + x.Remedy
		}
		if x.Level > Skipped {
			line += " [" + x.Docs + "]"
		}
		fmt.Fprintln(w, inspect.Printable(line))
	}
	fmt.Fprintf(w, "\nerrors: %d, warnings: %d, skipped: %d\n", count[Error], count[Warning], count[Skipped])
}
