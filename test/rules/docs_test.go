package rules

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// declared finds the names of all functions, methods and types of the project.
func declared(t *testing.T) map[string]bool {
	t.Helper()
	cmd := exec.Command("git", "grep", "-hE", `^(func|type|var) |^\t[A-Z][A-Za-z]*\(`, "--", "*.go", ":!*_test.go")
	cmd.Dir = harness.Root()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|type |var |\t)([A-Za-z]+)`).FindAllSubmatch(out, -1) {
		names[string(m[1])] = true
	}
	return names
}

// The ways of a request in docs/architecture.md name functions that there are.
func TestTheWaysNameFunctionsThatThereAre(t *testing.T) {
	text, err := os.ReadFile(harness.Root() + "/docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, ways, _ := strings.Cut(string(text), "## The way of a GET")
	ways, _, ok := strings.Cut(ways, "## Packages")
	ways = regexp.MustCompile(`(?m)^\|[^|]*\|`).ReplaceAllString(ways, "") // which package it is in
	names, found := declared(t), 0
	named := regexp.MustCompile("`([a-zA-Z]+)(?:\\.([A-Za-z]+))?(?:\\.([A-Za-z]+))?`")
	for _, m := range named.FindAllStringSubmatch(ways, -1) {
		name := m[1]
		switch {
		case m[1] == "rest": // upstream's
			continue
		case m[3] != "":
			name = m[3]
		case m[2] != "":
			name = m[2]
		}
		if found++; !names[name] {
			t.Errorf("%s: there is no %s", m[0], name)
		}
	}
	if !ok || found < 40 {
		t.Errorf("%d functions are named", found)
	}
}

// docs/bounds.md names tests that there are.
func TestTheBoundsNameTestsThatThereAre(t *testing.T) {
	text, err := os.ReadFile(harness.Root() + "/docs/bounds.md")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("git", "grep", "-hE", "^func Test", "--", "*_test.go")
	cmd.Dir = harness.Root()
	tests, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllSubmatch(text, -1)
	for _, m := range named {
		if !strings.Contains(string(tests), "func "+string(m[1])+"(") {
			t.Errorf("there is no %s", m[1])
		}
	}
	if len(named) < 30 {
		t.Errorf("%d tests are named", len(named))
	}
}
