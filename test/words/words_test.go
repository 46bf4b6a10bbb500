package words

import "testing"

func TestWordsAndSentencesAreCounted(t *testing.T) {
	for _, test := range []struct {
		text string
		want Figures
	}{
		{"The replica who asks. It tells `who` asked what.",
			Figures{Words: 9, Sentences: 2, Hits: [7]int{1, 0, 1, 0, 1, 0, 0}}},
		{"Nobody's watch is where those are", Figures{Words: 6, Sentences: 1, Hits: [7]int{0, 1, 0, 1, 0, 1, 0}}},
		{"- a list\n- of two", Figures{Words: 4, Sentences: 2}},
		{"a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e", Figures{Words: 31, Sentences: 1, Long: 1}},
	} {
		if got := Of(test.text); got != test.want {
			t.Errorf("Of(%q) = %+v, want %+v", test.text, got, test.want)
		}
	}
}

func TestACellOfATableIsASentence(t *testing.T) {
	got := Markdown("# Title\n| a b | c d |\n|---|---|\n```\nwhat who\n```\n")
	if got.Sentences != 3 || got.Words != 5 || got.Faults() != 0 {
		t.Errorf("%+v", got)
	}
}

func TestCommentsAndHelpTextsAreCounted(t *testing.T) {
	got, err := Go("x.go", []byte("package x\n\n// what is a.\n"+
		"func f() { fs.StringVar(&s, \"name\", \"\", \"where \"+\"it is\") }\n//go:embed who\n"))
	if err != nil || got.Sentences != 2 || got.Hits != [7]int{0, 0, 0, 1, 1, 0, 0} {
		t.Errorf("%+v, %v", got, err)
	}
}
