package rules

import (
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"watershed.dev/test/harness"
)

// git returns the output of a git command in the root of the project.
func git(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = harness.Root()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// declared returns the names of all functions, methods and types of the project.
func declared(t *testing.T) map[string]bool {
	t.Helper()
	out := git(t, "grep", "-hE", `^(func|type|var) |^\t[A-Z][A-Za-z]*\(`, "--", "*.go", ":!*_test.go")
	names := map[string]bool{}
	declaration := regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|type |var |\t)([A-Za-z]+)`)
	for _, m := range declaration.FindAllStringSubmatch(out, -1) {
		names[m[1]] = true
	}
	return names
}

// page returns the text of a document without its drawings.
func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Root(), "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile("(?s)```.*?```").ReplaceAllString(string(text), "")
}

// TestWalkthroughsNameFunctions checks that the functions that the request walkthroughs name exist.
func TestWalkthroughsNameFunctions(t *testing.T) {
	text := page(t, "contributors/request-walkthroughs.md")
	text = regexp.MustCompile(`(?m)^\|[^|]*\|`).ReplaceAllString(text, "") // the column of packages
	names, found := declared(t), 0
	named := regexp.MustCompile("`([a-zA-Z]+)(?:\\.([A-Za-z]+))?(?:\\.([A-Za-z]+))?`")
	for _, m := range named.FindAllStringSubmatch(text, -1) {
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
	if found < 40 {
		t.Errorf("%d functions are named", found)
	}
}

// TestTheCodeMapListsEveryPackage compares the code map with the packages of the tree.
func TestTheCodeMapListsEveryPackage(t *testing.T) {
	out := git(t, "ls-files", "*.go", ":!test/peers/*", ":!proto/tools/*")
	missing := map[string]bool{}
	for _, file := range strings.Fields(out) {
		missing[path.Dir(file)] = true
	}
	delete(missing, "test") // tools.go
	listed := regexp.MustCompile("`([a-z][a-z0-9/]+)`")
	for _, m := range listed.FindAllStringSubmatch(page(t, "contributors/code-map.md"), -1) {
		info, err := os.Stat(filepath.Join(harness.Root(), m[1]))
		if strings.Contains(m[1], "/") && (err != nil || !info.IsDir()) {
			t.Errorf("the code map lists %s, which does not exist", m[1])
		}
		delete(missing, m[1])
	}
	for _, p := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("the code map lacks %s", p)
	}
}

// TestLinksLeadSomewhere checks the relative links of all documents.
func TestLinksLeadSomewhere(t *testing.T) {
	out := git(t, "ls-files", "*.md")
	link := regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)
	for _, file := range strings.Fields(out) {
		text, err := os.ReadFile(filepath.Join(harness.Root(), file))
		if err != nil {
			continue // removed and not committed
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], ":") {
				continue
			}
			if _, err := os.Stat(filepath.Join(harness.Root(), filepath.Dir(file), m[1])); err != nil {
				t.Errorf("%s links to %s, which does not exist", file, m[1])
			}
		}
	}
}

// TestPagesNameFilesAndTestsThatExist checks the paths and the tests that documents name in backquotes.
func TestPagesNameFilesAndTestsThatExist(t *testing.T) {
	exists := tests(t)
	named := regexp.MustCompile("`((?:cmd|deploy|docs|platform|proto|services|test)/[a-z0-9][\\w./-]*)`")
	for _, file := range strings.Fields(git(t, "ls-files", "*.md")) {
		text, err := os.ReadFile(filepath.Join(harness.Root(), file))
		if err != nil {
			continue // removed and not committed
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(harness.Root(), m[1])); err != nil {
				t.Errorf("%s names %s, which does not exist", file, m[1])
			}
		}
		for _, m := range namedTest.FindAllStringSubmatch(string(text), -1) {
			if !exists[m[1]] {
				t.Errorf("%s: there is no %s", file, m[1])
			}
		}
	}
}

// tests returns the names of all tests and fuzz tests of the project.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	out := git(t, "grep", "-hE", "^func (Test|Fuzz)", "--", "*_test.go")
	names := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`).FindAllStringSubmatch(out, -1) {
		names[m[1]] = true
	}
	return names
}

var namedTest = regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`")

// TestTheBoundsNameTests checks that each row of docs/operators/bounds.md, and of the promises in event-log.md and
// consistency.md, names tests, or gives the reason why it has none. faults.md and security.md name tests.
func TestTheBoundsNameTests(t *testing.T) {
	for name, least := range map[string]int{"bounds.md": 60, "faults.md": 60, "security.md": 2} {
		if n := len(namedTest.FindAllString(page(t, "operators/"+name), -1)); n < least {
			t.Errorf("%s names %d tests, want %d", name, n, least)
		}
	}
	rowsNameTests(t, "operators/bounds.md", page(t, "operators/bounds.md"), 60)
	for name, least := range map[string]int{"event-log.md": 15, "consistency.md": 20} {
		_, promises, _ := strings.Cut(page(t, "concepts/"+name), "\n## Promises\n")
		promises, _, _ = strings.Cut(promises, "\n## ")
		rowsNameTests(t, name, promises, least)
	}
}

// rowsNameTests checks that the last cell of each row of the tables names a test, or is "none: " and a reason.
func rowsNameTests(t *testing.T, name, tables string, least int) {
	t.Helper()
	rows := 0
	for line := range strings.Lines(tables) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 || strings.HasPrefix(line, "|---") ||
			slices.Contains([]string{"bound", "promise"}, strings.TrimSpace(cells[1])) {
			continue
		}
		rows++
		last := strings.TrimSpace(cells[len(cells)-2])
		if reason, none := strings.CutPrefix(last, "none: "); (!none || reason == "") && !namedTest.MatchString(last) {
			t.Errorf("%s: %s: %q is neither a test nor \"none: \" and a reason", name, strings.TrimSpace(cells[1]), last)
		}
	}
	if rows < least {
		t.Errorf("%s has %d rows, want %d", name, rows, least)
	}
}

// TestThePriceListCountsLines compares the lines of each mechanism with the files that its design page lists. They may
// differ by a fifth.
func TestThePriceListCountsLines(t *testing.T) {
	row := regexp.MustCompile(`(?m)^\| \[[^\]]+\]\((\d{4}-[^)]+\.md)\)[^|]* \| ([0-9,]+) \|`)
	listed := regexp.MustCompile("(?m)^- `([^`]+)`$")
	found := 0
	for _, m := range row.FindAllStringSubmatch(page(t, "design/README.md"), -1) {
		_, code, _ := strings.Cut(page(t, "design/"+m[1]), "\n## Code\n")
		code, _, _ = strings.Cut(code, "\n## ")
		lines := 0
		for _, file := range listed.FindAllStringSubmatch(code, -1) {
			content, err := os.ReadFile(filepath.Join(harness.Root(), file[1]))
			if err != nil {
				t.Errorf("%s: %v", m[1], err)
			}
			lines += strings.Count(string(content), "\n")
		}
		if lines == 0 {
			continue // parts of files
		}
		found++
		printed, err := strconv.Atoi(strings.ReplaceAll(m[2], ",", ""))
		if err != nil {
			t.Fatal(err)
		}
		if 5*max(printed-lines, lines-printed) > lines {
			t.Errorf("docs/design/README.md: %s has %d lines, and its files have %d", m[1], printed, lines)
		}
	}
	if found < 15 {
		t.Errorf("the price list has %d mechanisms with files, and had 19", found)
	}
}

// TestDocumentsAreNarrow checks the lines of documents, except tables, code, pictures and the generated pages.
func TestDocumentsAreNarrow(t *testing.T) {
	const most = 118
	generated := []string{"docs/operators/configuration.md", "docs/operators/metrics.md"}
	for _, name := range strings.Fields(git(t, "ls-files", "*.md")) {
		if slices.Contains(generated, name) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(harness.Root(), name))
		if err != nil {
			t.Fatal(err)
		}
		code := false
		for i, line := range strings.Split(string(text), "\n") {
			start := strings.TrimSpace(line)
			if strings.HasPrefix(start, "```") {
				code = !code
			}
			wide := code || strings.HasPrefix(line, "    ") || strings.HasPrefix(start, "|") ||
				strings.HasPrefix(start, "![") || strings.HasPrefix(start, "<")
			if n := utf8.RuneCountInString(line); n > most && !wide {
				t.Errorf("%s:%d has %d columns, more than %d", name, i+1, n, most)
			}
		}
	}
}
