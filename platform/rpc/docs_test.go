package rpc

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// docs/operators/security.md has the table of AllowedClients.
func TestDocumentedClients(t *testing.T) {
	text, err := os.ReadFile("../../docs/operators/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "<!-- callers -->\n")
	documented, _, ok := strings.Cut(rest, "<!-- /callers -->")
	want := "| method | callers |\n|---|---|\n"
	for _, m := range slices.Sorted(maps.Keys(AllowedClients)) {
		want += fmt.Sprintf("| `%s` | %s |\n", strings.TrimPrefix(m, "/"), strings.Join(AllowedClients[m], ", "))
	}
	if !ok || documented != want {
		t.Errorf("docs/operators/security.md must have:\n%s", want)
	}
}

// docs/contributors/rpc-failures.md documents for every method how its callers handle a failure.
func TestEveryFailureIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/contributors/rpc-failures.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "## When an RPC fails")
	table, _, _ = strings.Cut(table, "\n## ")
	documented := map[string]bool{}
	for line := range strings.Lines(table) {
		methods, _, ok := strings.Cut(strings.TrimPrefix(line, "| "), " |")
		service, names, dotted := strings.Cut(methods, ".")
		if !ok || !dotted {
			continue
		}
		for name := range strings.SplitSeq(names, ", ") {
			documented[service+"/"+name] = true
		}
	}
	for m := range AllowedClients {
		if short := m[strings.LastIndex(m, ".")+1:]; !documented[short] {
			t.Errorf("docs/contributors/rpc-failures.md does not document a failure of %s", short)
		}
	}
}
