package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/services/registry"
	"watershed.dev/services/watchfanout"
)

// statusFlags are the flags of `watershed status`.
type statusFlags struct {
	inspect.Options
	every  time.Duration
	output inspect.Output
}

// addFlags adds the flags to fs.
func (f *statusFlags) addFlags(fs *pflag.FlagSet) {
	f.Options.AddFlags(fs)
	fs.DurationVarP(&f.every, "watch", "w", 0, "The interval between repeated outputs; -w: 2s. 0: print once.")
	fs.Lookup("watch").NoOptDefVal = "2s"
	f.output.AddFlag(fs)
}

// statusCommand prints the state of every process of a running Watershed, of etcd, of the event log and of the watch
// tier.
func statusCommand(fs *pflag.FlagSet) func() error {
	f := &statusFlags{}
	f.addFlags(fs)
	return f.run
}

func (f *statusFlags) run() error {
	if err := f.output.Validate(); err != nil {
		return err
	}
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	for {
		var out strings.Builder
		err := f.show(ctx, &out)
		if f.every > 0 && !f.output.IsJSON() {
			fmt.Print(clearScreen(os.Stdout), time.Now().Format(time.TimeOnly), "\n")
		}
		fmt.Print(inspect.Printable(out.String()))
		if f.every <= 0 {
			return err
		}
		if err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, err)
		}
		if lifecycle.Sleep(ctx, f.every) != nil {
			return nil
		}
	}
}

// clearScreen returns the sequence that clears a terminal, or an empty string for a file, a pipe or TERM=dumb.
func clearScreen(f *os.File) string {
	if _, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err != nil || os.Getenv("TERM") == "dumb" {
		return ""
	}
	return "\033[H\033[2J"
}

// show writes the state once. It fails if no process responds.
func (f *statusFlags) show(ctx context.Context, w io.Writer) error {
	all, err := f.Reports(ctx, process.Shallow)
	if err != nil {
		return err
	}
	responds := slices.ContainsFunc(all, func(r *process.Report) bool { return r.Error == "" })
	if f.output.IsJSON() {
		err = json.NewEncoder(w).Encode(all)
	} else {
		err = showTables(w, all, responds)
	}
	if !responds {
		return errors.New("no process responds")
	}
	return err
}

// showTables writes the tables that have rows.
func showTables(w io.Writer, all []*process.Report, responds bool) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	if len(all) > 0 {
		showProcesses(t, all, time.Now())
	}
	if responds {
		showStores(t, all)
		showTier(t, all)
	}
	return t.Flush()
}

// showProcesses lists the processes.
func showProcesses(t io.Writer, all []*process.Report, now time.Time) {
	fmt.Fprintln(t, "PROCESS\tSERVICES\tVERSION\tADDRESS\tREADY\tAGE\tMEMORY\tREQUESTS/S\tP99")
	for _, r := range all {
		services := strings.Join(r.Services, ",")
		if r.Error != "" {
			fmt.Fprintf(t, "-\t%s\tno response\t%s\t\t\t\t\t\n", services, r.Address)
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%v\t%s\t%s\t%.1f\t%s\n", r.Name(), services, r.Version,
			cmp.Or(r.Address, "-"), len(r.NotReady) == 0, age(now.Sub(r.Started)), megabytes(int(r.MemoryBytes)),
			r.RequestsPerSecond, p99(r.P99Seconds))
	}
}

var age, p99 = process.FormatAge, process.FormatP99

// showStores lists the members of etcd, and the event log as each registry sees it.
func showStores(t io.Writer, all []*process.Report) {
	seen := map[string]bool{}
	var members, logs []string
	for _, r := range all {
		st := &registry.State{}
		if !r.State("registry", st) {
			continue
		}
		for _, e := range st.Etcds {
			for _, m := range e.Members {
				if seen[m.Endpoint] {
					continue
				}
				seen[m.Endpoint] = true
				members = append(members, fmt.Sprintf("%s\t%s\t%v\t%s\t%s\t%s\t%s", m.Endpoint,
					cmp.Or(m.Version, "no response"), m.Leader, megabytes(int(m.Bytes)), megabytes(int(m.InUseBytes)),
					megabytes(int(m.QuotaBytes)), cmp.Or(strings.Join(slices.Concat(e.Alarms, m.Errors), ","), "-")))
			}
		}
		for _, l := range st.Logs {
			logs = append(logs, fmt.Sprintf("%s\t%s\t%v\t%d\t%s\t%d/%d\t%d\t%s of %s\t%s of %s",
				cmp.Or(l.Log, "main"), r.Name(), l.Publishing, l.Revision, cmp.Or(l.Error, l.Leader, "-"), l.Current,
				l.Wanted, l.Messages,
				megabytes(int(l.Bytes)), megabytes(int(l.MaxBytes)), age(time.Duration(l.OldestSeconds)*time.Second),
				age(time.Duration(l.RetentionSeconds)*time.Second)))
		}
	}
	if len(members) > 0 {
		fmt.Fprintln(t, "\nETCD\tVERSION\tLEADER\tSIZE\tIN USE\tQUOTA\tALARMS")
		fmt.Fprintln(t, strings.Join(members, "\n"))
	}
	if len(logs) > 0 {
		fmt.Fprintln(t, "\nEVENT LOG\tREGISTRY\tPUBLISHES\tREVISION\tNATS LEADER\tREPLICAS\tMESSAGES\tSIZE\tRETENTION")
		fmt.Fprintln(t, strings.Join(logs, "\n"))
	}
}

// showTier lists the replicas of the watch tier, and their totals by resource.
func showTier(t io.Writer, all []*process.Report) {
	type held struct{ replicas, objects, unreadable, bytes, events, watches int }
	resources := map[string]*held{}
	var slow []string
	fmt.Fprintln(t, "\nREPLICA\tREADY\tREVISION\tBEHIND\tLAG\tSTREAMS\tEVENTS/S\tMEMORY\tRESETS")
	for _, p := range all {
		st := &watchfanout.Status{}
		if p.Error != "" && slices.Contains(p.Services, "watchfanout") {
			fmt.Fprintf(t, "%s\tno response\t\t\t\t\t\t\t\n", p.Name())
		}
		if !p.State("watchfanout", st) {
			continue
		}
		fmt.Fprintf(t, "%s\t%v\t%d\t%s\t%.1f ms\t%d\t%.0f\t%s\t%d\n", p.Name(), st.Ready, st.Revision,
			behind(st.Behind), st.LagMilliseconds, st.Watches, st.EventsPerSecond, megabytes(st.Bytes), st.Resets)
		for _, r := range st.Resources {
			h := resources[r.Name]
			if h == nil {
				h = &held{}
				resources[r.Name] = h
			}
			h.watches += r.Watches
			h.bytes += r.Memory()
			h.events = max(h.events, r.Events)
			if r.Loaded {
				h.replicas++
				h.objects, h.unreadable = max(h.objects, r.Objects), max(h.unreadable, r.Unreadable)
			}
		}
		for _, s := range st.Slowest {
			slow = append(slow, fmt.Sprintf("%s\t%s\t%d\t%d", s.Resource, p.Name(), s.Waiting, s.Revision))
		}
	}
	var names []string
	for n, h := range resources {
		if h.replicas+h.watches > 0 {
			names = append(names, n)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(resources[b].bytes, resources[a].bytes), strings.Compare(a, b))
	})
	fmt.Fprintln(t, "\nRESOURCE\tREPLICAS\tOBJECTS\tRECENT EVENTS\tMEMORY\tSTREAMS")
	// Loaded resources without objects and recent events share a row, if there are several.
	isEmpty := func(n string) bool {
		h := resources[n]
		return h.replicas > 0 && h.objects+h.unreadable+h.events == 0
	}
	empty, others := 0, &held{}
	for _, n := range names {
		if h := resources[n]; isEmpty(n) {
			empty++
			others.replicas, others.watches = max(others.replicas, h.replicas), others.watches+h.watches
			others.bytes += h.bytes
		}
	}
	if empty > 1 {
		names = slices.DeleteFunc(names, isEmpty)
		last := fmt.Sprintf("%d others", empty)
		names, resources[last] = append(names, last), others
	}
	for _, n := range names {
		h := resources[n]
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%d\n", n, h.replicas, h.objects, h.events, megabytes(h.bytes), h.watches)
	}
	if len(slow) > 0 {
		fmt.Fprintln(t, "\nSLOWEST STREAMS\tREPLICA\tWAITING\tREVISION")
		for _, s := range slow {
			fmt.Fprintln(t, s)
		}
	}
}

func behind(n int64) string {
	if n < 0 {
		return "?"
	}
	return fmt.Sprint(n)
}

func megabytes(n int) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
