package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// breakage is a deliberate defect: a build replaces code with instead, and the checker must detect it.
type breakage struct {
	name, file, code, instead string
}

// mistakes are the defects. `go build -overlay` applies them, so the source files do not change.
var mistakes = []breakage{
	{
		name:    "drop",
		file:    "platform/watchcache/core/replica.go",
		code:    "		if c.pending = append(c.pending[:n], e); !e.More {\n",
		instead: "		if e.StorageResource == \"configmaps\" && e.Revision%97 == 0 {\n			c.advance(e)\n			return c.effects\n		}\n		if c.pending = append(c.pending[:n], e); !e.More {\n",
	},
	{
		name:    "repeat",
		file:    "platform/watchcache/watch/watch.go",
		code:    "		if err := out.addEvent(data, false, e.Traceparent); err != nil {\n",
		instead: "		if e.Revision%97 == 0 {\n			_ = out.addEvent(data, false, \"\")\n		}\n		if err := out.addEvent(data, false, e.Traceparent); err != nil {\n",
	},
	{
		name:    "reorder",
		file:    "platform/watchcache/cache/ring.go",
		code:    "		trigger.Add(e)\n		trigger.notify()\n",
		instead: "		trigger.Add(e)\n		if all := trigger.From(trigger.Base()); r.Name == \"configmaps\" && len(all) > 1 && e.Revision%97 == 0 {\n			all[len(all)-1], all[len(all)-2] = all[len(all)-2], all[len(all)-1]\n		}\n		trigger.notify()\n",
	},
	{
		name:    "stale",
		file:    "platform/watchcache/logreader/reader.go",
		code:    "	return l.waitForEtcd(ctx, r, epoch, progress)\n",
		instead: "	_, _ = epoch, progress\n	return l.Wait(ctx, r-20)\n",
	},
}

func breakages() (names []string) {
	for _, b := range mistakes {
		names = append(names, b.name)
	}
	return names
}

// runBroken builds and runs each broken Watershed. It returns the exit code: 0 if the checker detected every defect.
func runBroken(ctx context.Context, o options, which string) int {
	code := 0
	for _, b := range mistakes {
		if which != "all" && which != b.name {
			continue
		}
		binary, err := b.build(ctx)
		if err != nil {
			log.Print(err)
			return 2
		}
		broken := o
		broken.watershed = binary
		r, err := run(ctx, broken)
		_ = os.RemoveAll(filepath.Dir(binary))
		switch {
		case err != nil:
			log.Printf("%s: %v", b.name, err)
			return 2
		case len(r.found) == 0:
			fmt.Printf("%s: NOT FOUND\n", b.name)
			code = 1
		default:
			fmt.Printf("%s: found, %d contradictions, the first: %s\n", b.name, len(r.found), r.found[0])
			if o.dir == "" {
				_ = os.RemoveAll(r.dir)
			}
		}
	}
	if which != "all" && !slices.Contains(breakages(), which) {
		log.Printf("-break %q: want one of %s, or all", which, strings.Join(breakages(), ", "))
		return 2
	}
	return code
}

func (b breakage) build(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOWORK").Output()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(strings.TrimSpace(string(root)))
	source := filepath.Join(dir, b.file)
	text, err := os.ReadFile(source)
	if err != nil {
		return "", err
	}
	if err := b.applies(string(text)); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp("", "wsb")
	if err != nil {
		return "", err
	}
	replaced, overlay := filepath.Join(tmp, "replaced.go"), filepath.Join(tmp, "overlay.json")
	binary := filepath.Join(tmp, "watershed")
	if err := os.WriteFile(replaced, []byte(strings.Replace(string(text), b.code, b.instead, 1)), 0o600); err != nil {
		return "", err
	}
	j, err := json.Marshal(map[string]map[string]string{"Replace": {source: replaced}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, j, 0o600); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "-o", binary, "./cmd/watershed")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("-break %s: %w\n%s", b.name, err, out)
	}
	return binary, nil
}

// applies returns an error unless text contains the code to replace exactly once.
func (b breakage) applies(text string) error {
	if strings.Count(text, b.code) != 1 {
		return fmt.Errorf("-break %s: %s does not contain this code exactly once: %q", b.name, b.file, b.code)
	}
	return nil
}
