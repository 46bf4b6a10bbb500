package process

import (
	"encoding/json"
	"slices"
	"testing"
)

// Two registries read the same etcd, and a process may report only programs. Clocks are compared with the process that
// received the reports.
func TestReportsOfPrograms(t *testing.T) {
	etcd := func(skew float64) *Report {
		return &Report{ID: "e", Services: []string{"etcd"}, SkewSeconds: skew,
			States: map[string]json.RawMessage{"registry": nil}}
	}
	first := &Report{ID: "a", SkewSeconds: 60, Programs: onlyPrograms([]*Report{
		etcd(-70), {ID: "n", Services: []string{"nats"}}, {ID: "x", Services: []string{"authz"}},
		{ID: "y", Services: []string{"etcd", "gateway"}}, {ID: "z"},
	})}
	second := &Report{ID: "b", Programs: []*Report{etcd(-10)}}
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
