package rpc

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// docs/security.md shows the table as it is.
func TestTheDocumentedCallersAreTheCallers(t *testing.T) {
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "<!-- callers -->\n")
	documented, _, ok := strings.Cut(rest, "<!-- /callers -->")
	want := "| method | callers |\n|---|---|\n"
	for _, m := range slices.Sorted(maps.Keys(Callers)) {
		want += fmt.Sprintf("| `%s` | %s |\n", strings.TrimPrefix(m, "/"), strings.Join(Callers[m], ", "))
	}
	if !ok || documented != want {
		t.Errorf("docs/security.md is to say:\n%s", want)
	}
}
