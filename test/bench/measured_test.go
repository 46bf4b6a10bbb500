package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

func TestNumbersArePlain(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0012345: "0.00123", 0.22: "0.22", 1.5: "1.5", 12.34: "12.3", 99.96: "100", 1180: "1180",
		1234567: "1234567", -2.5: "-2.5", 3: "3",
	} {
		if got := plain(v); got != want {
			t.Errorf("%v is written %s, not %s", v, got, want)
		}
	}
}

func TestTheMedianIsInTheMiddle(t *testing.T) {
	values := []float64{3, 1, 2}
	if got := median(values); got != 2 || values[0] != 3 {
		t.Errorf("%v of %v", got, values)
	}
	if got := median([]float64{4, 1, 2, 3}); got != 2.5 {
		t.Error(got)
	}
	if got := median([]float64{7}); got != 7 {
		t.Error(got)
	}
}

// TestProcessorTimeIsUserAndSystem checks process names with brackets and spaces.
func TestProcessorTimeIsUserAndSystem(t *testing.T) {
	const rest = " S 1 2 3 0 -1 4194560 100 0 0 0 250 50 9 9 20 0 14 0 100 1000 200"
	for _, name := range []string{"(watershed)", "(a) b (c)", "( 1 2 3 )"} {
		if got := secondsOf([]byte("42 " + name + rest)); got != 3 {
			t.Errorf("%s has used %v s", name, got)
		}
	}
	if got := secondsOf([]byte("42 (gone)")); got != 0 {
		t.Error(got)
	}
}

func TestAProcessIsOfItsService(t *testing.T) {
	for file, want := range map[string]string{
		"gateway-1.pid": "gateway", "watchfanout-12.pid": "watchfanout", "nats.pid": "nats", "etcd-0.pid": "etcd",
	} {
		if got := serviceOf(file); got != want {
			t.Errorf("%s is of %q", file, got)
		}
	}
}

// tables returns results of two servers: a CPU-time row, and a row of another kind for one server only.
func tables() *measured {
	m := newMeasured([]string{"kube-apiserver", "split"})
	const work = "GET a pod <b> & more (CPU ms)"
	m.record(work, "kube-apiserver", 0.6, map[string]float64{"kube-apiserver": 3})
	m.record(work, "kube-apiserver", 0.5, map[string]float64{"kube-apiserver": 3})
	m.record(work, "split", 1, map[string]float64{"gateway": 1, "registry": 1, "authn": 0.001})
	m.record(work, "split", 3, map[string]float64{"gateway": 5, "registry": 1})
	m.record("peak (MB)", "split", 1180, map[string]float64{"gateway": 1, "registry": 1})
	return m
}

func TestTheTableHasMediansSpreadAndShares(t *testing.T) {
	got := tables().markdown("A machine.")
	for _, want := range []string{
		"A machine.\n\n| work | kube-apiserver | split |\n|---|---|---|\n",
		"| GET a pod <b> & more (CPU ms) | 0.55 (0.5 to 0.6) | 2 (1 to 3) |\n",
		"| peak (MB) |  | 1180 |\n",
		"| GET a pod <b> & more (CPU ms) | split | gateway 75 % · registry 25 % |\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	if strings.Contains(got, "| peak (MB) | split |") || strings.Contains(got, "authn") {
		t.Errorf("what has no share is there:\n%s", got)
	}
}

func TestTheDocumentHoldsEveryRound(t *testing.T) {
	data, err := tables().document()
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Rows map[string]map[string]sample
	}
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	for row, of := range d.Rows {
		if s := of["split"]; strings.Contains(row, "GET") && (len(s.Values) != 2 || s.Shares["gateway"] < 0.7) {
			t.Errorf("%s: %+v", row, s)
		}
	}
}

func TestThePlotIsWellFormed(t *testing.T) {
	got := tables().bars()
	for d := xml.NewDecoder(strings.NewReader(got)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in %s", err, got)
		}
	}
	if strings.Count(got, `height="8"`) != 2 || strings.Contains(got, "peak") {
		t.Errorf("bars of other rows than those of processor time: %s", got)
	}
}

func TestPercentiles(t *testing.T) {
	var of []time.Duration
	for n := range 200 {
		of = append(of, time.Duration(200-n)*time.Millisecond)
	}
	for p, want := range map[int]float64{50: 100, 99: 198, 100: 200} {
		if got := percentile(of, p); got != want {
			t.Errorf("the %d-th percentile is %v ms, not %v", p, got, want)
		}
	}
	if got := percentile(of[:1], 99); got != 200 {
		t.Errorf("of a single duration: %v ms", got)
	}
}

// TestAnEventHasAStageForEachProcess checks that the stages are parts of the event's row, and only for split.
func TestAnEventHasAStageForEachProcess(t *testing.T) {
	seconds := map[string]float64{"registry": 2, "nats": 1, "watchfanout": 3, "gateway": 4, "authn": 0.5}
	of := eventRows("pods", seconds, 1e4)
	for row, want := range map[string]float64{
		"pods (CPU µs an event)":                1050,
		"pods, the publisher (CPU µs an event)": 200,
		"pods, the log (CPU µs an event)":       100,
		"pods, the replicas (CPU µs an event)":  300,
		"pods, the gateways (CPU µs an event)":  400,
	} {
		if of[row] != want {
			t.Errorf("%s: %v, not %v", row, of[row], want)
		}
	}
	if of := eventRows("pods", map[string]float64{"front": 2, "watchfanout": 1}, 1e4); len(of) != 1 {
		t.Errorf("compact has no process for a stage: %v", of)
	}
}
