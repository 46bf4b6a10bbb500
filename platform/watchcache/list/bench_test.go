package list_test

import (
	"fmt"
	"strings"
	"testing"

	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/list"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// sink is a client that discards everything.
type sink struct{ body }

func (*sink) Send(*watchfanoutv1.ListChunk) error { return nil }

// BenchmarkList measures a list of 5,000 pods at a replica that has served the same list before.
func BenchmarkList(b *testing.B) {
	w := fixture.New(b)
	l := list.New(w.Discovery, w.Cache, w.LogReader, w.Converter, 64<<20)
	listOnce := func(table, gzip bool) {
		r := cached()
		if r.Gzip = gzip; table {
			r.Query = fixture.Table(r.Query)
		}
		if err := l.List(r, &sink{body{ctx: b.Context()}}); err != nil {
			b.Fatal(err)
		}
	}
	listOnce(false, false) // loads the resource
	for i := range 5000 {
		name := fmt.Sprintf("pod-%05d", i)
		o := fixture.Object(name, 11, "node-0")
		o.Json = fmt.Appendf(o.Json[:len(o.Json)-1], `,"spec":%q}`, strings.Repeat("x", 7600))
		w.Cache.Apply(&logv1.Event{
			Type: logv1.Type_TYPE_ADDED, Revision: 11 + int64(i), StorageResource: "pods", Namespace: "x", Name: name,
			Epoch: "h", Object: o,
		})
	}
	for _, table := range []bool{false, true} {
		for _, gzip := range []bool{false, true} {
			b.Run(fmt.Sprintf("table=%v/gzip=%v", table, gzip), func(b *testing.B) {
				for b.Loop() {
					listOnce(table, gzip)
				}
			})
		}
	}
}
