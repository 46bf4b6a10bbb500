package rules

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"watershed.dev/test/harness"
	"watershed.dev/test/words"
)

var (
	updateWords = flag.Bool("update-words", false, "write the current figures to words.json")
	otherTree   = flag.String("tree", "", "print the figures of another checkout, without a comparison")
)

// limits are the highest allowed rates of each column in 10,000 words. Each is twice the highest rate of etcd, boulder,
// tempo and kcp, in comments and in documents.
var limits = map[string][7]float64{
	".go": {1.2, 0.2, 4.4, 15.6, 11.4, 71.8, 1.4},
	".md": {7.6, 0.2, 4.4, 22.2, 22.8, 58.8, 0.8},
}

// maxLong is the highest allowed share of sentences with more than 30 words, in percent.
const maxLong = 8

// TestWordsStayWithinLimits compares the rates of the whole project with the limits.
func TestWordsStayWithinLimits(t *testing.T) {
	counted, err := words.Tree(os.DirFS(harness.Root()))
	if err != nil {
		t.Fatal(err)
	}
	for kind, f := range totals(counted) {
		for i, column := range words.Columns {
			if f.Rate(i) > limits[kind][i] {
				t.Errorf("%s: %q has %.1f in 10,000 words, at most %.1f are allowed", kind, column, f.Rate(i),
					limits[kind][i])
			}
		}
		if f.LongShare() > maxLong {
			t.Errorf("%s: %.1f %% of sentences have more than %d words", kind, f.LongShare(), words.LongSentence)
		}
	}
}

// TestWordsGetNoWorse compares the counts of each file with its record in words.json.
func TestWordsGetNoWorse(t *testing.T) {
	root := harness.Root()
	if *otherTree != "" {
		root = *otherTree
	}
	counted, err := words.Tree(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	printWords(counted)
	if *otherTree != "" {
		return
	}
	file := filepath.Join(root, "test", "rules", "words.json")
	recorded := map[string]int{}
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &recorded)
	}
	if err != nil && !*updateWords {
		t.Fatal(err)
	}
	now := map[string]int{}
	for path, f := range counted {
		if n := f.Faults(); n > 0 {
			now[path] = n
		}
		if f.Faults() > recorded[path] && !*updateWords {
			t.Errorf("%s has %d forbidden words and long sentences, %d are recorded: %s", path, f.Faults(),
				recorded[path], faults(f))
		}
	}
	if *updateWords {
		text, _ := json.MarshalIndent(now, "", "  ")
		if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// faults lists the counts of a file.
func faults(f words.Figures) string {
	var out []string
	for i, column := range words.Columns {
		if f.Hits[i] > 0 {
			out = append(out, fmt.Sprintf("%s %d", column, f.Hits[i]))
		}
	}
	if f.Long > 0 {
		out = append(out, fmt.Sprintf("sentences of more than %d words %d", words.LongSentence, f.Long))
	}
	return strings.Join(out, ", ")
}

// totals returns the sums of Go files and of documents, by extension.
func totals(counted map[string]words.Figures) map[string]*words.Figures {
	sums := map[string]*words.Figures{".go": {}, ".md": {}}
	for path, f := range counted {
		sums[filepath.Ext(path)].Add(f)
	}
	return sums
}

// printWords prints one row for comments and help texts, and one for documents.
func printWords(counted map[string]words.Figures) {
	all := totals(counted)
	fmt.Printf("%-9s %8s", "", "words")
	for _, column := range words.Columns {
		fmt.Printf(" %10s", column)
	}
	fmt.Printf(" %10s %10s\n", "sentence", ">30 words")
	for _, kind := range []struct{ name, ext string }{{"comments", ".go"}, {"documents", ".md"}} {
		f := all[kind.ext]
		fmt.Printf("%-9s %8d", kind.name, f.Words)
		for i := range words.Columns {
			fmt.Printf(" %10.1f", f.Rate(i))
		}
		fmt.Printf(" %10.1f %9.1f%%\n", float64(f.Words)/float64(max(1, f.Sentences)), f.LongShare())
	}
}
