package events

import (
	"testing"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A watch begins at the position that the watch API defines, and a resumed watch continues.
func TestStartOf(t *testing.T) {
	yes, no := true, false
	at := Position{Revision: 7, Index: 2, Epoch: "h"}
	five := Position{Revision: 5, Index: LastIndex}
	for name, c := range map[string]struct {
		version string
		initial *bool
		resume  bool
		done    bool
		want    Start
	}{
		"unset":                          {"", nil, false, false, Start{Initial: true}},
		"any":                            {"0", nil, false, false, Start{Initial: true, AnyRevision: true}},
		"a revision":                     {"5", nil, false, false, Start{At: five}},
		"no initial events":              {"", &no, false, false, Start{}},
		"no initial events of any":       {"0", &no, false, false, Start{}},
		"initial events not older than":  {"5", &yes, false, false, Start{Initial: true, At: five}},
		"resumed":                        {"5", nil, true, false, Start{At: at}},
		"resumed after initial events":   {"", nil, true, true, Start{At: at}},
		"broken amid its initial events": {"", nil, true, false, Start{Initial: true}},
	} {
		r := &watchfanoutv1.WatchRequest{
			ResourceVersion:   c.version,
			SendInitialEvents: c.initial,
			InitialEventsDone: c.done,
		}
		if c.resume {
			r.ResumeAfter = at.Proto()
		}
		if got, err := StartOf(r); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := StartOf(&watchfanoutv1.WatchRequest{ResourceVersion: "x"}); err == nil {
		t.Error("an odd version is a place")
	}
}
