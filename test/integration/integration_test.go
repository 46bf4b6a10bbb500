package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

func TestTheEditsApplyToUpstreamsFiles(t *testing.T) {
	work, overlay, err := workspace(harness.Root(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(work)
	if err != nil || !strings.Contains(string(text), "replace k8s.io/kubernetes => ") {
		t.Errorf("go.work is %q (%v)", text, err)
	}
	list, err := os.ReadFile(overlay)
	if err != nil {
		t.Fatal(err)
	}
	for name := range edits {
		if edited := strings.ReplaceAll(name, "/", "-"); !strings.Contains(string(list), edited) {
			t.Errorf("the overlay has no %s", edited)
		}
	}
}

func TestAnEditThatMatchesNothingFails(t *testing.T) {
	e := edit{from: "a", to: "b", text: "x\n"}
	for _, text := range []string{"\nc\n", "\na\nc\n", "\na\na\nb\n"} {
		if got, err := e.apply([]byte(text)); err == nil {
			t.Errorf("%q becomes %q", text, got)
		}
	}
	if got, err := e.apply([]byte("\nab\nb\n")); err != nil || string(got) != "\nx\nb\n" {
		t.Errorf("got %q (%v)", got, err)
	}
}

func TestACauseIsAFailureWithoutAFailedSubtest(t *testing.T) {
	r := results{"TestA": failed, "TestA/x": failed, "TestA/x/1": failed, "TestA/x/2": pass, "TestB": skipped,
		"TestC": pass, "TestC/x": skipped, "TestD": failed, "TestD/x": pass}
	for top, want := range map[string][]string{
		"TestA": {"TestA/x/1"}, "TestB": {"TestB"}, "TestC": nil, "TestD": {"TestD"},
	} {
		if got := r.causes(top); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", top, got, want)
		}
	}
	if got := r.outcomes()["TestA"]; got != (outcome{failed, 1}) {
		t.Errorf("got %v", got)
	}
}

func TestOnlyUnexplainedDifferencesAreProblems(t *testing.T) {
	dir := t.TempDir()
	known := "# a comment\np\tTestA/x\tdeclared difference\ta reason\np\tTestB\tto mend\tanother\n"
	if err := os.WriteFile(filepath.Join(dir, "known.tsv"), []byte(known), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := readRecords(dir)
	if err != nil {
		t.Fatal(err)
	}
	passes := outcome{pass, 1}
	r.reference["p"] = map[string]outcome{"TestA": passes, "TestB": passes, "TestC": passes, "TestD": {failed, 0}}
	ours := results{"TestA": failed, "TestA/x": failed, "TestA/x/1": failed, "TestB": pass, "TestC": failed,
		"TestC/x": failed, "TestD": failed}
	if again := r.unexplained("p", ours); !slices.Equal(again, []string{"TestC"}) {
		t.Errorf("%q run again", again)
	}
	ours.replace(results{"TestC": failed})
	problems := r.compare("p", ours)
	var got []string
	for _, p := range problems {
		got = append(got, p.Error())
	}
	want := []string{
		`p TestB: passes, but has the reason "another"`,
		"p TestC: passes with kube-apiserver only",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTheRecordsAreValid(t *testing.T) {
	r, err := readRecords("record")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range r.known {
		top, _, _ := strings.Cut(k.test, "/")
		if r.reference[k.pkg][top].result != pass {
			t.Errorf("%s %s has a reason, but does not pass with kube-apiserver", k.pkg, k.test)
		}
	}
}
