package publisher

import (
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"

	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/storage"
)

// The labels and fields of an object are known to be unchanged only if its state before the event was published.
func TestUnchangedSelections(t *testing.T) {
	var s selections
	var pods, others storage.Resource
	web := &logv1.Object{Labels: map[string]string{"app": "web", "tier": "a"}, Fields: map[string]string{"node": "n"}}
	moved := &logv1.Object{Labels: web.Labels, Fields: map[string]string{"node": "m"}}
	crossed := &logv1.Object{Labels: web.Fields, Fields: web.Labels}
	for _, step := range []struct {
		name             string
		of               *storage.Resource
		previous, now    int64
		object           *logv1.Object
		deleted, changed bool
	}{
		{"an unknown object", &pods, 1, 2, web, false, true},
		{"no change", &pods, 2, 3, web, false, false},
		{"no change again", &pods, 3, 4, &logv1.Object{Labels: web.Labels, Fields: web.Fields}, false, false},
		{"another field", &pods, 4, 5, moved, false, true},
		{"the field again", &pods, 5, 6, web, false, true},
		{"fields as labels", &pods, 6, 7, crossed, false, true},
		{"an event that was not published", &pods, 8, 9, crossed, false, true},
		{"another definition", &others, 9, 10, crossed, false, true},
		{"a deletion", &others, 10, 11, crossed, true, true},
		{"created again", &others, 0, 12, crossed, false, true},
		{"created without a previous state", &others, 0, 13, crossed, false, true},
		{"no change after it", &others, 13, 14, crossed, false, false},
	} {
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("/registry/pods/x/a"), ModRevision: step.now}}
		if step.deleted {
			e.Type = mvccpb.DELETE
		}
		if step.previous > 0 {
			e.PrevKv = &mvccpb.KeyValue{ModRevision: step.previous}
		}
		if got := s.record(e, step.of, step.object); got != step.changed {
			t.Errorf("%s: %v", step.name, got)
		}
	}
}

// A set has the last two of its keys.
func TestSelectionsOfManyObjects(t *testing.T) {
	var s selections
	var pods storage.Resource
	o := &logv1.Object{Labels: map[string]string{"app": "web"}}
	isKnown := func(n int, revision int64) bool {
		return !s.record(&mvccpb.Event{Kv: &mvccpb.KeyValue{Key: fmt.Append(nil, n), ModRevision: revision + 1},
			PrevKv: &mvccpb.KeyValue{ModRevision: revision}}, &pods, o)
	}
	const objects = selectionSets / 2
	known := 0
	for n := range 2 * objects {
		if isKnown(n%objects, int64(n/objects+1)) {
			known++
		}
	}
	if known < objects*17/20 || known > objects {
		t.Errorf("%d of %d objects are known", known, objects)
	}
}
