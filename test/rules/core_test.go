package rules

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// coreDir is the deterministic core of the event path.
const coreDir = "platform/watchcache/core"

// coreImports are the packages that the core may import. Neither has I/O, a lock or a goroutine of its own.
var coreImports = []string{
	"cmp", "errors", "fmt", "maps", "math", "slices", "sort", "strconv", "strings", "time",
	"github.com/cespare/xxhash/v2", "watershed.dev/platform/events", "watershed.dev/proto/watershed/log/v1",
	"watershed.dev/proto/watershed/watchfanout/v1",
}

// clockNames are the names of package time that read a clock or wait.
var clockNames = []string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "Tick", "NewTicker", "NewTimer"}

// maxCoreLines bounds the core. A larger core is no longer read as a whole.
const maxCoreLines = 2500

// TestTheCoreIsDeterministic checks that the core has no I/O, clock, lock, goroutine or channel, and stays small.
func TestTheCoreIsDeterministic(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(harness.Root(), coreDir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	lines := 0
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		lines += strings.Count(string(text), "\n")
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, text, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range file.Imports {
			if path, _ := strconv.Unquote(i.Path.Value); !slices.Contains(coreImports, path) {
				t.Errorf("%s imports %s", set.Position(i.Pos()), path)
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if found := nondeterminism(n); found != "" {
				t.Errorf("%s: %s", set.Position(n.Pos()), found)
			}
			return true
		})
	}
	if lines > maxCoreLines {
		t.Errorf("the core has %d lines, more than %d", lines, maxCoreLines)
	}
}

// nondeterminism returns the name of a construct that the core may not have.
func nondeterminism(n ast.Node) string {
	switch n := n.(type) {
	case *ast.GoStmt:
		return "a goroutine"
	case *ast.ChanType, *ast.SendStmt, *ast.SelectStmt:
		return "a channel"
	case *ast.UnaryExpr:
		if n.Op == token.ARROW {
			return "a channel"
		}
	case *ast.SelectorExpr:
		if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clockNames, n.Sel.Name) {
			return "a clock: time." + n.Sel.Name
		}
	}
	return ""
}
