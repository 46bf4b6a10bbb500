package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// The failed top-level tests are known with their times, and their output is printed. A package that fails by itself,
// also beside a failed test, has no name.
func TestFailedTests(t *testing.T) {
	events := `{"Time":"2026-11-30T10:00:00Z","Action":"run","Package":"p","Test":"TestA"}
{"Time":"2026-11-30T10:00:01Z","Action":"run","Package":"p","Test":"TestB"}
{"Time":"2026-11-30T10:00:01Z","Action":"pause","Package":"p","Test":"TestA"}
{"Time":"2026-11-30T10:00:02Z","Action":"cont","Package":"p","Test":"TestA"}
{"Time":"2026-11-30T10:00:02Z","Action":"output","Package":"p","Test":"TestA/sub","Output":"too late\n"}
{"Time":"2026-11-30T10:00:02Z","Action":"output","Package":"p","Test":"TestB","Output":"quiet\n"}
{"Time":"2026-11-30T10:00:03Z","Action":"fail","Package":"p","Test":"TestA/sub"}
{"Time":"2026-11-30T10:00:04Z","Action":"fail","Package":"p","Test":"TestA"}
{"Time":"2026-11-30T10:00:05Z","Action":"pass","Package":"p","Test":"TestB"}
{"Time":"2026-11-30T10:00:05Z","Action":"output","Package":"p","Output":"FAIL\tp\t5s\n"}
{"Time":"2026-11-30T10:00:05Z","Action":"fail","Package":"p"}
{"Time":"2026-11-30T10:00:06Z","Action":"output","Package":"q","Output":"FAIL\tq [build failed]\n"}
{"Time":"2026-11-30T10:00:06Z","Action":"fail","Package":"q"}
{"Time":"2026-11-30T10:00:07Z","Action":"run","Package":"r","Test":"TestC"}
{"Time":"2026-11-30T10:00:07Z","Action":"output","Package":"r","Test":"TestC","Output":"\npanic: test timed out after 1s\n"}
{"Time":"2026-11-30T10:00:08Z","Action":"fail","Package":"r","Test":"TestC"}
{"Time":"2026-11-30T10:00:08Z","Action":"fail","Package":"r"}
{"Time":"2026-11-30T10:00:08Z","Action":"run","Package":"s","Test":"TestD"}
{"Time":"2026-11-30T10:00:08Z","Action":"fail","Package":"s","Test":"TestD"}
{"Time":"2026-11-30T10:00:08Z","Action":"run","Package":"s","Test":"TestE"}
{"Time":"2026-11-30T10:00:08Z","Action":"output","Package":"s","Test":"TestE","Output":"fatal error: x\n"}
{"Time":"2026-11-30T10:00:09Z","Action":"fail","Package":"s"}
not an event
`
	var out strings.Builder
	failed := read(strings.NewReader(events), &out)
	at := func(second int) time.Time { return time.Date(2026, 11, 30, 10, 0, second, 0, time.UTC) }
	want := []test{{"p", "TestA", at(2), at(4)}, {pack: "q"}, {"r", "TestC", at(7), at(8)}, {pack: "r"},
		{"s", "TestD", at(8), at(8)}, {pack: "s"}}
	if !slices.Equal(failed, want) {
		t.Errorf("%+v, want %+v", failed, want)
	}
	if want := "too late\nFAIL\tp\t5s\nFAIL\tq [build failed]\n\npanic: test timed out after 1s\nfatal error: x\nnot an event\n"; out.String() != want {
		t.Errorf("output %q, want %q", out.String(), want)
	}
	if during([]stall{{at(5), at(7)}}, failed[0]) != nil {
		t.Error("a stall after the test is a stall of the test")
	}
	if during([]stall{{at(3), at(7)}}, failed[0]) == nil {
		t.Error("the stall of the test is not found")
	}
}

// The longest tests of a package are printed at its end, without short tests and subtests.
func TestLongestTests(t *testing.T) {
	events := `{"Action":"pass","Package":"p","Test":"TestA/sub","Elapsed":40}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":12}
{"Action":"fail","Package":"p","Test":"TestB","Elapsed":123.45}
{"Action":"pass","Package":"p","Test":"TestC","Elapsed":9}
{"Action":"pass","Package":"q","Test":"TestD","Elapsed":50}
{"Action":"fail","Package":"p","Elapsed":140}
`
	var out strings.Builder
	read(strings.NewReader(events), &out)
	if want := "\t 123.5 s  TestB\n\t  12.0 s  TestA\n"; out.String() != want {
		t.Errorf("output %q, want %q", out.String(), want)
	}
}

// A test runs again only if the machine stood still during it. The others count at once.
func TestTestsThatCountAtOnce(t *testing.T) {
	now := time.Now()
	stalls := []stall{{now, now.Add(2 * time.Second)}}
	for what, failed := range map[string]test{
		"without a stall":    {"p", "TestA", now.Add(-time.Minute), now.Add(-time.Second)},
		"a failed build":     {pack: "p"},
		"a package of never": {"robustness", "TestA", now.Add(-time.Minute), now.Add(time.Minute)},
	} {
		if again([]test{failed}, stalls, []string{"robustness"}, nil) {
			t.Errorf("%s: the failure does not count", what)
		}
	}
	if again(nil, stalls, nil, nil) {
		t.Error("a failure without a test does not count")
	}
}
