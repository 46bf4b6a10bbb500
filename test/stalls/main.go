// Command stalls runs `go test`. A test that fails while the machine stands still runs again, and counts if it fails
// again. Virtual machines stand still for up to half a minute, and tests bound the time that a client waits. At the end
// of a package, its longest tests are printed.
//
//	go run ./stalls -never watershed.dev/test/robustness -- -count=1 -timeout=45m ./e2e ./robustness
//
// The arguments after -- are flags in the form -name=value and packages of `go test`. The output of tests that fail is
// printed, also if they pass when they run again.
//
// A goroutine reads the clock every 50 ms. The machine stood still if more than a second passed between two readings.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

// longest is the longest time between two readings of the clock on a machine that does not stand still.
const longest = time.Second

// slow is the least time of a test that is printed at the end of its package.
const slow = 10 * time.Second

func main() {
	log.SetFlags(log.Ltime)
	never := flag.String("never", "", "Packages whose tests do not run again, separated by commas.")
	flag.Parse()
	c := &clock{}
	go c.run()
	tests, failed := goTest(flag.Args())
	if failed && again(tests, c.stalls(), strings.Split(*never, ","), flag.Args()) {
		failed = false
	}
	if failed {
		os.Exit(1)
	}
}

// test is a top-level test that has failed, or a package whose failure has another cause (name is empty).
type test struct {
	pack, name string
	began, end time.Time
}

// again runs the failed tests again. It returns true if all of them may run again, and pass.
func again(failed []test, stalls []stall, never, args []string) bool {
	repeated := map[string][]string{} // the names by package
	for _, t := range failed {
		if t.name == "" || during(stalls, t) == nil || slices.Contains(never, t.pack) {
			return false
		}
		repeated[t.pack] = append(repeated[t.pack], t.name)
	}
	for _, t := range failed {
		s := during(stalls, t)
		log.Printf("%s failed, and the machine stood still for %s at %s: it runs again", t.name,
			s.to.Sub(s.from).Round(100*time.Millisecond), s.from.Format(time.TimeOnly))
	}
	flags := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return !strings.HasPrefix(a, "-") })
	for _, pack := range slices.Sorted(maps.Keys(repeated)) {
		run := "-run=^(" + strings.Join(repeated[pack], "|") + ")$"
		if _, failed := goTest(append(slices.Clone(flags), run, pack)); failed {
			return false
		}
	}
	return len(failed) > 0
}

// goTest runs `go test`, and returns the failed tests. failed is also true if `go test` fails by itself.
func goTest(args []string) (tests []test, failed bool) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		log.Fatal(err)
	}
	tests = read(out, os.Stdout)
	return tests, cmd.Wait() != nil
}

// event is an event of `go test -json` (go doc test2json).
type event struct {
	Time                          time.Time
	Action, Package, Test, Output string
	Elapsed                       float64 // seconds, without the time in which a parallel test waits for its turn
}

// read returns the failed tests of a stream of events. It prints the lines of packages, and of tests that fail.
func read(events io.Reader, to io.Writer) (failed []test) {
	type id struct{ pack, name string }
	began, output := map[id]time.Time{}, map[id][]string{}
	tests := map[string]bool{}      // the packages with failed tests
	elapsed := map[string][]event{} // the last events of slow tests, by package
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return failed
		}
		var e event
		if json.Unmarshal(line, &e) != nil { // a line of `go test` itself
			_, _ = to.Write(line)
			continue
		}
		name, _, sub := strings.Cut(e.Test, "/")
		t := id{e.Package, name}
		if !sub && (e.Action == "pass" || e.Action == "fail") {
			if name != "" && e.Elapsed >= slow.Seconds() {
				elapsed[e.Package] = append(elapsed[e.Package], e)
			} else if name == "" {
				printLongest(to, elapsed[e.Package])
			}
		}
		switch {
		case e.Action == "output" && name == "", e.Action == "build-output":
			if e.Output != "PASS\n" {
				_, _ = io.WriteString(to, e.Output)
			}
		case e.Action == "output":
			output[t] = append(output[t], e.Output)
		case sub:
		case e.Action == "run", e.Action == "cont": // a parallel test continues much later
			began[t] = e.Time
		case e.Action == "fail" && name == "":
			unfinished := false // the process has ended in a test, and others have not run
			for running := range began {
				if running.pack == e.Package {
					unfinished = true
					fmt.Fprint(to, strings.Join(output[running], ""))
				}
			}
			if unfinished || !tests[e.Package] {
				failed = append(failed, test{pack: e.Package})
			}
		case e.Action == "fail":
			fmt.Fprint(to, strings.Join(output[t], ""))
			failed, tests[e.Package] = append(failed, test{e.Package, name, began[t], e.Time}), true
			if strings.Contains(strings.Join(output[t], ""), "\npanic: ") { // also after -timeout
				failed = append(failed, test{pack: e.Package})
			}
			delete(output, t)
			delete(began, t)
		case e.Action == "pass", e.Action == "skip":
			delete(output, t)
			delete(began, t)
		}
	}
}

// printLongest prints the ten longest of some tests, and their times.
func printLongest(to io.Writer, ends []event) {
	slices.SortStableFunc(ends, func(a, b event) int { return cmp.Compare(b.Elapsed, a.Elapsed) })
	for _, e := range ends[:min(10, len(ends))] {
		fmt.Fprintf(to, "\t%6.1f s  %s\n", e.Elapsed, e.Test)
	}
}

// stall is a time in which the machine stood still.
type stall struct{ from, to time.Time }

// during returns a stall during a test, or nil.
func during(stalls []stall, t test) *stall {
	i := slices.IndexFunc(stalls, func(s stall) bool { return s.from.Before(t.end) && s.to.After(t.began) })
	if i < 0 {
		return nil
	}
	return &stalls[i]
}

// clock records stalls.
type clock struct {
	mu   sync.Mutex
	seen []stall
}

func (c *clock) run() {
	for last := time.Now(); ; {
		time.Sleep(50 * time.Millisecond) // between two readings
		now := time.Now()
		if now.Sub(last) > longest {
			c.mu.Lock()
			c.seen = append(c.seen, stall{last, now})
			c.mu.Unlock()
		}
		last = now
	}
}

func (c *clock) stalls() []stall {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.seen)
}
