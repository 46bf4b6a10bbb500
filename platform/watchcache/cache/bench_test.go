package cache

import (
	"strconv"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// BenchmarkApply measures an event of a loaded resource, with and without watches that read it.
func BenchmarkApply(b *testing.B) {
	for name, watches := range map[string]int{"no watch": 0, "100 watches": 100} {
		b.Run(name, func(b *testing.B) {
			c := New(1<<20, 0)
			c.Apply(reset(1))
			var names []string
			for i := range 1000 {
				names = append(names, "pod-"+strconv.Itoa(i))
			}
			if _, err := c.Resource("pods").Snapshot(b.Context(), "", source(1, names...), waitFor(c)); err != nil {
				b.Fatal(err)
			}
			subs, cursors := make([]*Subscription, watches), make([]Cursor, watches)
			for i := range subs {
				subs[i] = subscribe(c, "pods")
				cursors[i], _, _ = subs[i].After(1, 0)
			}
			e := event(logv1.Type_TYPE_MODIFIED, 1, "pod-500")
			b.ReportAllocs()
			for b.Loop() {
				e.Revision++
				c.Apply(e)
				for i, s := range subs {
					batch, next, _, _, ok := s.Next(cursors[i], 100)
					if !ok || len(batch) != 1 {
						b.Fatal("an event is missing")
					}
					cursors[i] = next
				}
			}
		})
	}
}

// BenchmarkOtherTriggers measures an event that wakes no watch, as the event of a pod does for the kubelets of other
// nodes. The ring drops an event for each new event.
func BenchmarkOtherTriggers(b *testing.B) {
	for _, watches := range []int{0, 1_000, 10_000, 130_000} {
		b.Run(strconv.Itoa(watches), func(b *testing.B) {
			c := New(1<<20, 0)
			c.Apply(reset(1))
			for i := range watches {
				c.Resource("pods").Subscribe(Trigger{"spec.nodeName", "node-" + strconv.Itoa(i)})
			}
			e := event(logv1.Type_TYPE_MODIFIED, 1, "pod-500")
			for b.Loop() {
				e.Revision++
				c.Apply(e)
			}
		})
	}
}
