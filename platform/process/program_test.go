package process

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// The reports of programs in a report are displayed once each, without states. Reports of other services are not.
func TestProgramsAreListedOnce(t *testing.T) {
	report := func(text string) *Report {
		r, err := DecodeReport([]byte(text), time.Time{}, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	etcd := `{"id": "e", "services": ["etcd"], "states": {"registry": {}}, "programs": [{"services": ["nats"]}]}`
	first := report(`{"id": "a", "programs": [` + etcd + `, null, 1, {"id": "n", "services": ["nats"]},
		{"id": "x", "services": ["authz"]}, {"id": "y", "services": ["etcd", "gateway"]}, {"id": "z"}]}`)
	second := report(`{"id": "b", "programs": [` + etcd + `]}`)
	first.SkewSeconds = 60
	first.Programs[0].SkewSeconds, second.Programs[0].SkewSeconds = -70, -10
	all := WithPrograms([]*Report{first, second})
	var ids []string
	for _, r := range all {
		ids = append(ids, r.ID)
		if r.Programs != nil || r.States != nil {
			t.Errorf("%+v", r)
		}
	}
	if !slices.Equal(ids, []string{"a", "b", "e", "n"}) || all[2].SkewSeconds != -10 {
		t.Errorf("%q, %+v", ids, all[2])
	}
}

// A report that another process sends is bounded: its bytes, and the number and bytes of its programs.
func TestReportsAreBounded(t *testing.T) {
	etcd := `{"services":["etcd"]}`
	r, err := DecodeReport([]byte(`{"programs": [`+strings.Repeat(etcd+",", 1000)+etcd+`]}`), time.Time{}, time.Time{})
	if err != nil || len(r.Programs) != maxPrograms {
		t.Errorf("%d programs, %v", len(r.Programs), err)
	}
	large := fmt.Sprintf(`{"services":["etcd"],"version":%q}`, strings.Repeat("x", maxProgramBytes))
	if err := json.Unmarshal([]byte("["+large+"]"), &r.Programs); err != nil || len(r.Programs) != 0 {
		t.Errorf("a large program: %+v, %v", r.Programs, err)
	}
	now := time.Now()
	for text, want := range map[string]string{
		large:                   "more than 65536",
		`{"services":["nats"]}`: `the report is of ["nats"], want ["etcd"]`,
		`null`:                  `the report is of [], want ["etcd"]`,
	} {
		if _, err := DecodeProgram("etcd", []byte(text), now, now); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, want %s", text, err, want)
		}
	}
	if _, err := DecodeReport(make([]byte, maxReportBytes+1), now, now); err == nil {
		t.Error("a report above the bound is decoded")
	}
}
