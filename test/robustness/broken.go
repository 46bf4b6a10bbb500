package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"watershed.dev/test/harness"
)

// breakage is a deliberate defect: a build replaces code with instead. The tests of test must detect it, and the
// checker too if inCluster is true.
type breakage struct {
	name, file, code, instead string
	// also are further replacements for the cluster: they remove the defences that hide the defect from clients, or let
	// its trigger happen.
	also []edit
	// test is a package and the tests that must fail, such as "./platform/events TestRing". Empty: none.
	test string
	// inCluster is true if clients of a cluster can see the defect within maxFaults.
	inCluster bool
	// faults is the number of faults that the cluster has; 0: maxFaults. kinds are their kinds, comma separated; empty:
	// the kinds of the options.
	faults int
	kinds  string
}

// edit is a replacement of code in a file of the source.
type edit struct{ file, code, instead string }

// maxFaults is the number of faults within which the checker must detect a defect.
const maxFaults = 50

func (b *breakage) edits() []edit { return append([]edit{{b.file, b.code, b.instead}}, b.also...) }

// mistakes are the defects without a history. `go build -overlay` applies them, so the source files do not change.
var mistakes = []breakage{
	{
		inCluster: true,
		name:      "drop",
		file:      "platform/watchcache/core/replica.go",
		code:      "		if c.pending = append(c.pending[:n], e); !e.More {\n",
		instead:   "		if e.StorageResource == \"configmaps\" && e.Revision%97 == 0 {\n			c.advance(e)\n			return c.effects\n		}\n		if c.pending = append(c.pending[:n], e); !e.More {\n",
	},
	{
		inCluster: true,
		name:      "repeat",
		file:      "platform/watchcache/watch/watcher.go",
		code:      "		if err := out.addEvent(data, false, e.Traceparent); err != nil {\n",
		instead:   "		if e.Revision%97 == 0 {\n			_ = out.addEvent(data, false, \"\")\n		}\n		if err := out.addEvent(data, false, e.Traceparent); err != nil {\n",
	},
	{
		inCluster: true,
		name:      "reorder",
		file:      "platform/watchcache/cache/ring.go",
		code:      "		t.Add(e)\n		t.notify()\n",
		instead:   "		t.Add(e)\n		if all := t.From(t.Base()); r.Name == \"configmaps\" && len(all) > 1 && e.Revision%97 == 0 {\n			all[len(all)-1], all[len(all)-2] = all[len(all)-2], all[len(all)-1]\n		}\n		t.notify()\n",
	},
	{
		inCluster: true,
		name:      "stale",
		file:      "platform/watchcache/logreader/reader.go",
		code:      "	return l.waitForEtcd(ctx, r, epoch, progress)\n",
		instead:   "	_, _ = epoch, progress\n	return l.Wait(ctx, r-20)\n",
	},
}

// everyBreakage returns the mistakes and the historical bugs.
func everyBreakage() []breakage { return slices.Concat(mistakes, historical) }

func breakages() (names []string) {
	for _, b := range everyBreakage() {
		names = append(names, b.name)
	}
	return names
}

// Values of -break beside the name of a defect.
const (
	breakAll   = "all"
	breakTests = "tests" // every defect that a test must detect, without a cluster
)

// runBroken runs the tests and the cluster of each broken Watershed. It returns the exit code: 0 if every defect was
// detected.
func runBroken(ctx context.Context, o options, which string) int {
	if which != breakAll && which != breakTests && !slices.Contains(breakages(), which) {
		log.Printf("-break %q: want %s, %s, or one of %s", which, breakAll, breakTests, strings.Join(breakages(), ", "))
		return 2
	}
	code := 0
	for _, b := range everyBreakage() {
		if which != breakAll && which != breakTests && which != b.name {
			continue
		}
		var by []func() (string, error)
		if b.test != "" {
			by = append(by, func() (string, error) { return b.runTest(ctx) })
		}
		if b.inCluster && which != breakTests {
			by = append(by, func() (string, error) { return b.runCluster(ctx, o) })
		}
		for _, find := range by {
			found, err := find()
			if err != nil {
				log.Printf("%s: %v", b.name, err)
				return 2
			}
			if found == "" {
				fmt.Printf("%s: NOT FOUND\n", b.name)
				code = 1
				continue
			}
			fmt.Printf("%s: found by %s\n", b.name, found)
		}
	}
	return code
}

// runCluster runs a cluster of the broken Watershed. It returns the finding of the checker, or an empty string.
func (b breakage) runCluster(ctx context.Context, o options) (string, error) {
	overlay, err := b.overlay(b.edits())
	if err != nil {
		return "", err
	}
	tmp := filepath.Dir(overlay)
	defer func() { _ = os.RemoveAll(tmp) }()
	o.watershed = filepath.Join(tmp, "watershed")
	cmd := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-overlay", overlay, "-o", o.watershed,
		"./cmd/watershed")
	cmd.Dir = harness.Root()
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("-break %s: %w\n%s", b.name, err, out)
	}
	o.faults = min(o.faults, cmp.Or(b.faults, maxFaults))
	if b.kinds != "" {
		o.kinds = strings.Split(b.kinds, ",")
	}
	o.mayDelete = slices.Contains(o.kinds, loseMessage)
	r, err := run(ctx, o)
	if err != nil || len(r.found) == 0 {
		return "", err
	}
	if o.dir == "" {
		_ = os.RemoveAll(r.dir)
	}
	return fmt.Sprintf("the checker with seed %d, %d contradictions, the first: %s", r.seed, len(r.found),
		r.found[0]), nil
}

// runTest runs the tests of the broken code. It returns the first failure, or an empty string if the tests pass.
func (b breakage) runTest(ctx context.Context) (string, error) {
	overlay, err := b.overlay(b.edits()[:1])
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(filepath.Dir(overlay)) }()
	pkg, tests, _ := strings.Cut(b.test, " ")
	began := time.Now()
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-vet=off", "-timeout=90s", "-overlay", overlay,
		"-run", "^("+tests+")$", pkg)
	cmd.Dir = harness.Root()
	out, err := cmd.CombinedOutput()
	if err == nil {
		return "", nil
	}
	var failed, reason string
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		switch name, isFailure := strings.CutPrefix(line, "--- FAIL: "); {
		case isFailure && failed == "":
			failed, _, _ = strings.Cut(name, " ")
		case reason == "" && (strings.Contains(line, "_test.go:") || strings.HasPrefix(line, "panic: ")):
			reason = line
		}
	}
	if failed == "" && reason == "" {
		return "", fmt.Errorf("-break %s: %w\n%s", b.name, err, out)
	}
	return fmt.Sprintf("%s %s after %v: %s", pkg, failed, time.Since(began).Round(time.Second), reason), nil
}

// overlay writes an overlay for the go command that makes the edits, in a temporary directory.
func (b breakage) overlay(edits []edit) (string, error) {
	replaced := map[string]string{} // by source file
	for _, e := range edits {
		source := filepath.Join(harness.Root(), e.file)
		text, ok := replaced[source]
		if !ok {
			data, err := os.ReadFile(source)
			if err != nil {
				return "", err
			}
			text = string(data)
		}
		if err := e.applies(text); err != nil {
			return "", fmt.Errorf("-break %s: %w", b.name, err)
		}
		replaced[source] = strings.Replace(text, e.code, e.instead, 1)
	}
	tmp, err := os.MkdirTemp("", "wsb")
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for source, text := range replaced {
		replace[source] = filepath.Join(tmp, fmt.Sprintf("%d-%s", len(replace), filepath.Base(source)))
		if err := os.WriteFile(replace[source], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	j, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(tmp, "overlay.json")
	return overlay, os.WriteFile(overlay, j, 0o600)
}

// applies returns an error unless text contains the code to replace exactly once.
func (e edit) applies(text string) error {
	if strings.Count(text, e.code) != 1 {
		return fmt.Errorf("%s does not contain this code exactly once: %q", e.file, e.code)
	}
	return nil
}
