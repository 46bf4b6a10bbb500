package rules

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// declared returns the names of all functions, methods and types of the project.
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

// TestTheWaysNameFunctionsThatThereAre checks that the functions named by the request walkthroughs in
// docs/architecture.md exist.
func TestTheWaysNameFunctionsThatThereAre(t *testing.T) {
	text, err := os.ReadFile(harness.Root() + "/docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, ways, _ := strings.Cut(string(text), "## The way of a GET")
	ways, _, ok := strings.Cut(ways, "## Packages")
	ways = regexp.MustCompile(`(?m)^\|[^|]*\|`).ReplaceAllString(ways, "") // the column of packages
	names, found := declared(t), 0
	named := regexp.MustCompile("`([a-zA-Z]+)(?:\\.([A-Za-z]+))?(?:\\.([A-Za-z]+))?`")
	for _, m := range named.FindAllStringSubmatch(ways, -1) {
		name := m[1]
		switch {
		case m[1] == "rest": // a package of upstream
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

// tests returns the names of all tests and fuzz tests of the project.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	cmd := exec.Command("git", "grep", "-hE", "^func (Test|Fuzz)", "--", "*_test.go")
	cmd.Dir = harness.Root()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`).FindAllSubmatch(out, -1) {
		names[string(m[1])] = true
	}
	return names
}

var namedTest = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`")

// TestTheBoundsNameTestsThatThereAre checks docs/bounds.md and docs/security.md. Each row of bounds.md names existing
// tests, or gives the reason why it has none. The tests that security.md names must exist.
func TestTheBoundsNameTestsThatThereAre(t *testing.T) {
	exists := tests(t)
	for name, least := range map[string]int{"bounds.md": 60, "security.md": 2} {
		text, err := os.ReadFile(harness.Root() + "/docs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		named := namedTest.FindAllSubmatch(text, -1)
		for _, m := range named {
			if !exists[string(m[1])] {
				t.Errorf("%s: there is no %s", name, m[1])
			}
		}
		if len(named) < least {
			t.Errorf("%s names %d tests, want %d", name, len(named), least)
		}
	}
	text, err := os.ReadFile(harness.Root() + "/docs/bounds.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 || strings.HasPrefix(line, "|---") || strings.TrimSpace(cells[1]) == "bound" {
			continue
		}
		rows++
		last := strings.TrimSpace(cells[len(cells)-2])
		if reason, none := strings.CutPrefix(last, "none: "); (!none || reason == "") && !namedTest.MatchString(last) {
			t.Errorf("%s: %q is neither a test nor \"none: \" and a reason", strings.TrimSpace(cells[1]), last)
		}
	}
	if rows < 60 {
		t.Errorf("there are %d rows", rows)
	}
}
