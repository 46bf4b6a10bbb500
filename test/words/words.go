// Package words counts the words and the sentences of comments, of flags' help texts and of documents. test/rules holds
// the project to the figures, and its -tree flag prints those of another checkout.
package words

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// LongSentence is the number of words above which a sentence counts as long.
const LongSentence = 30

// Columns are the names of the word families, in the order of Figures.Hits.
var Columns = []string{"who", "nobody", "told", "where", "what", "one, those", "anew, lest"}

// families has the pattern of each column. Code in backquotes is one word, and is never counted as one of a family.
var families = []*regexp.Regexp{
	regexp.MustCompile(`(?i)^(who|whom|whoever)$`),
	regexp.MustCompile(`(?i)^(nobody|somebody|everybody|anybody)('s)?$`),
	regexp.MustCompile(`(?i)^(told|tell|tells|telling)$`),
	regexp.MustCompile(`(?i)^where$`),
	regexp.MustCompile(`(?i)^(what|whatever)$`),
	regexp.MustCompile(`(?i)^(one|ones|those)$`),
	regexp.MustCompile(`(?i)^(anew|amid|lest|nor)$`),
}

// Figures are the counts of some text.
type Figures struct {
	Words, Sentences, Long int
	Hits                   [7]int
}

// Add adds the counts of other text.
func (f *Figures) Add(other Figures) {
	f.Words += other.Words
	f.Sentences += other.Sentences
	f.Long += other.Long
	for i, n := range other.Hits {
		f.Hits[i] += n
	}
}

// Faults returns the number of counted words and long sentences.
func (f Figures) Faults() int {
	n := f.Long
	for _, hits := range f.Hits {
		n += hits
	}
	return n
}

// Rate returns how often column i occurs in 10,000 words.
func (f Figures) Rate(i int) float64 { return 1e4 * float64(f.Hits[i]) / float64(max(1, f.Words)) }

// LongShare returns the share of long sentences in percent.
func (f Figures) LongShare() float64 { return 100 * float64(f.Long) / float64(max(1, f.Sentences)) }

var (
	code   = regexp.MustCompile("``[^`]+``|`[^`]+`")
	link   = regexp.MustCompile(`\]\([^)]*\)|https?://\S+`)
	word   = regexp.MustCompile(`[A-Za-z][A-Za-z0-9'’/_.-]*`)
	stop   = regexp.MustCompile(`[.!?]['")\]]*(?:\s+|$)|\n\s*\n`)
	bullet = regexp.MustCompile(`(?m)^\s*(?:[-*]|\d+\.)\s`)
	fence  = regexp.MustCompile("(?s)```.*?```|<!-- generated -->.*?<!-- /generated -->|" +
		"<!-- measured -->.*?<!-- end -->|<!--.*?-->")
	heading = regexp.MustCompile(`(?m)^#+ .*$`)
)

// Of counts plain text.
func Of(text string) (f Figures) {
	text = link.ReplaceAllString(code.ReplaceAllString(text, "Code"), " ")
	for _, sentence := range stop.Split(bullet.ReplaceAllString(text, "\n\n"), -1) {
		found := word.FindAllString(sentence, -1)
		if len(found) == 0 {
			continue
		}
		f.Sentences++
		f.Words += len(found)
		if len(found) > LongSentence {
			f.Long++
		}
		for _, w := range found {
			for i, family := range families {
				if family.MatchString(strings.TrimRight(w, ".'’/_-")) {
					f.Hits[i]++
				}
			}
		}
	}
	return f
}

// Markdown counts a document without its code blocks and generated parts. A cell of a table is a sentence.
func Markdown(text string) Figures {
	var out strings.Builder
	for line := range strings.Lines(heading.ReplaceAllString(fence.ReplaceAllString(text, ""), "$0\n")) {
		switch {
		case strings.HasPrefix(line, "    "), strings.HasPrefix(line, "\t"):
		case strings.HasPrefix(strings.TrimSpace(line), "|"):
			out.WriteString(strings.ReplaceAll(line, "|", "\n\n"))
		default:
			out.WriteString(line)
		}
	}
	return Of(out.String())
}

// Go counts the comments and the help texts of flags in a Go file. Generated files have none.
func Go(name string, src []byte) (Figures, error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, src, parser.ParseComments)
	if err != nil || ast.IsGenerated(file) {
		return Figures{}, err
	}
	var f Figures
	for _, group := range file.Comments {
		f.Add(Of(prose(group.Text())))
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			f.Add(Of(help(call)))
		}
		return true
	})
	return f, nil
}

// prose drops the indented lines of a comment, which are code, tables and drawings.
func prose(text string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "\t") && !strings.HasPrefix(line, "    ") {
			out.WriteString(line)
		}
	}
	return out.String()
}

var definesFlag = regexp.MustCompile(
	`^(Bool|Int|Int32|Int64|Uint|Uint32|Float64|String|StringSlice|StringArray|Duration|Func)?(Var|P|VarP)?$`)

// help returns the help text of a call that defines a flag.
func help(call *ast.CallExpr) string {
	fun, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) < 3 || !definesFlag.MatchString(fun.Sel.Name) {
		return ""
	}
	var out strings.Builder
	ast.Inspect(call.Args[len(call.Args)-1], func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				out.WriteString(s)
			}
		}
		return true
	})
	return out.String()
}

// Tree counts the Go files and the documents of a file system, by path. It skips hidden, vendored and test data.
func Tree(tree fs.FS) (map[string]Figures, error) {
	counted := map[string]Figures{}
	err := fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			hidden := path != "." && strings.HasPrefix(d.Name(), ".")
			if hidden || d.Name() == "vendor" || d.Name() == "testdata" {
				return fs.SkipDir
			}
			return nil
		}
		var f Figures
		switch filepath.Ext(path) {
		case ".md":
			text, err := fs.ReadFile(tree, path)
			if err != nil {
				return err
			}
			f = Markdown(string(text))
		case ".go":
			text, err := fs.ReadFile(tree, path)
			if err != nil {
				return err
			}
			if f, err = Go(path, text); err != nil {
				return nil // a template or a fixture that is no Go
			}
		}
		if f.Words > 0 {
			counted[path] = f
		}
		return nil
	})
	return counted, err
}
