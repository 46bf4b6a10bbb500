package cache

import (
	"context"
	"fmt"
	"slices"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Events are applied while an index is built, and the index has their changes. A reset discards the index.
func TestEventsAreAppliedWhileAnIndexIsBuilt(t *testing.T) {
	const node = "spec.nodeName"
	c := New(1<<20, 0)
	c.Apply(reset(10))
	rows := func(context.Context, string) (rows []*registryv1.Row, revision int64, err error) {
		for i := range 5 {
			rows = append(rows, &registryv1.Row{Name: fmt.Sprint("p", i), Fields: map[string]string{node: "n1"}})
		}
		return rows, 10, nil
	}
	apply := func(kind logv1.Type, name, node string) {
		e := event(kind, c.Progress()+1, name)
		e.Namespace, e.Object.Fields = "", map[string]string{"spec.nodeName": node}
		c.Apply(e)
	}
	r := c.Resource("pods")
	read := func(field string) *Snapshot {
		s, err := r.Snapshot(t.Context(), field, rows, waitFor(c))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	read("")
	b := r.beginIndex(node)
	if r.beginIndex(node) != nil {
		t.Error("two readers build the same index")
	}
	apply(logv1.Type_TYPE_MODIFIED, "p0", "n2")
	apply(logv1.Type_TYPE_DELETED, "p1", "n1")
	index := b.build()
	apply(logv1.Type_TYPE_ADDED, "p7", "n2")
	apply(logv1.Type_TYPE_MODIFIED, "p2", "n2")
	r.finishIndex(b, index)
	s := read(node)
	if s.indexes[node] == nil {
		t.Fatal("the snapshot has no index")
	}
	for value, want := range map[string][]string{"n1": {"p3", "p4"}, "n2": {"p0", "p2", "p7"}} {
		var got []string
		s.ScanField(Trigger{node, value}, "", "", func(i *Item) bool {
			got = append(got, i.Name)
			return true
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s has %q, not %q", value, got, want)
		}
	}
	b = r.beginIndex("spec.schedulerName")
	c.Apply(reset(100))
	r.finishIndex(b, b.build())
	if len(r.indexes) > 0 {
		t.Error("an index of former objects is installed")
	}
}
