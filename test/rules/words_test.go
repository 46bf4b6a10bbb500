package rules

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"watershed.dev/test/harness"
	"watershed.dev/test/words"
)

var (
	updateWords = flag.Bool("update-words", false, "write the current figures to words.json")
	otherTree   = flag.String("tree", "", "print the figures of another checkout, without a comparison")
)

// TestWordsGetNoWorse checks the rates of forbidden words. The limits are twice the highest rate of etcd, boulder,
// tempo and kcp, and 8 % of sentences with more than 30 words.
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
			t.Errorf("%s has %d forbidden words and long sentences, %d are recorded: %s", path, f.Faults(), recorded[path], faults(f))
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

// printWords prints one row for comments and help texts, and one for documents.
func printWords(counted map[string]words.Figures) {
	totals := map[string]*words.Figures{".go": {}, ".md": {}}
	for _, path := range slices.Sorted(maps.Keys(counted)) {
		totals[filepath.Ext(path)].Add(counted[path])
	}
	fmt.Printf("%-9s %8s", "", "words")
	for _, column := range words.Columns {
		fmt.Printf(" %10s", column)
	}
	fmt.Printf(" %10s %10s\n", "sentence", ">30 words")
	for _, kind := range []struct{ name, ext string }{{"comments", ".go"}, {"documents", ".md"}} {
		f := totals[kind.ext]
		fmt.Printf("%-9s %8d", kind.name, f.Words)
		for i := range words.Columns {
			fmt.Printf(" %10.1f", f.Rate(i))
		}
		fmt.Printf(" %10.1f %9.1f%%\n", float64(f.Words)/float64(max(1, f.Sentences)), f.LongShare())
	}
}
