package list

import (
	"context"
	"fmt"
	"testing"

	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/query"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// The snapshots of paged lists pin a bounded number of bytes of replaced objects, whatever is written meanwhile. The
// snapshots that pin most are dropped, and registry continues their lists.
func TestCachedSnapshotsAreBoundedInBytes(t *testing.T) {
	s := New(nil, cache.New(64<<20, 0), nil, nil, 0)
	load := func(context.Context, string, func(*registryv1.Row)) (int64, error) { return 1, nil }
	reached := func(context.Context, int64) error { return nil }
	s.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 1, Epoch: "h"})
	configmaps, small := s.cache.Resource("configmaps"), s.cache.Resource("small")
	snapshot := func(r *cache.Resource) *cache.Snapshot {
		t.Helper()
		out, err := r.Snapshot(t.Context(), "", load, reached)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	s.putSnapshot("small", "h", snapshot(small), pageStart{}, unknownCount)
	snapshot(configmaps)
	body := make([]byte, 1<<20)
	for revision := int64(2); revision < 200; revision++ { // a tenant that pages and writes
		s.cache.Apply(&logv1.Event{
			Type:            logv1.Type_TYPE_MODIFIED,
			Revision:        revision,
			StorageResource: "configmaps",
			Namespace:       "x",
			Name:            fmt.Sprint(revision % 3),
			Epoch:           "h",
			Object:          &logv1.Object{Json: body},
		})
		if revision%10 == 0 {
			s.putSnapshot("configmaps", "h", snapshot(configmaps), pageStart{}, unknownCount)
		}
		s.Sweep() // as Service.sweep does
		held := int64(0)
		for _, k := range s.snapshots {
			if k.storageResource == "configmaps" {
				held = max(held, k.snapshot.Pinned())
			}
		}
		if held > maxPinnedBytes {
			t.Fatalf("at revision %d, %d bytes of replaced objects are pinned", revision, held)
		}
	}
	if len(s.snapshots) < 2 {
		t.Errorf("%d snapshots are cached", len(s.snapshots))
	}
	if _, ok := s.cachedSnapshot("small", s.snapshots[0].snapshot.Revision); !ok {
		t.Error("a snapshot that pins nothing was dropped")
	}
}

// Pages have kube-apiserver's remainingItemCount. Only the first page of a namespace visits the objects after it.
func TestPagesCountTheirRemainingItems(t *testing.T) {
	w := fixture.New(t)
	l := New(w.Discovery, w.Cache, w.LogReader, w.Converter, 0)
	for namespace, reads := range map[string][]int{"": {2, 2, 1}, "x": {3, 2, 1}} {
		p := fixture.Query()
		p.Namespace = namespace
		q, err := query.Resolve(w.Discovery.View(), p)
		if err != nil {
			t.Fatal(err)
		}
		r := &watchfanoutv1.ListRequest{Limit: 1}
		for n, read := range reads {
			page, err := l.page(t.Context(), q, r)
			if err != nil {
				t.Fatal(err)
			}
			remaining := int64(0)
			if page.Remaining != nil {
				remaining = *page.Remaining
			}
			if remaining != int64(2-n) || page.read != read || (page.Continue == "") != (n == 2) {
				t.Errorf("page %d of %q has read %d objects and has %d remaining", n, namespace, page.read, remaining)
			}
			r.Continue = page.Continue
		}
	}
}

// The counts of a snapshot's pages are bounded.
func TestCountsAreBounded(t *testing.T) {
	w := fixture.New(t)
	l := New(w.Discovery, w.Cache, w.LogReader, w.Converter, 0)
	snapshot, err := w.LogReader.Snapshot(t.Context(), w.Cache.Resource("pods"), "")
	if err != nil {
		t.Fatal(err)
	}
	for n := range int64(1000) {
		next := pageStart{"", fmt.Sprint(n)}
		l.putSnapshot("pods", "h", snapshot, next, n)
		if got := l.countFrom("pods", snapshot, next); got != n || len(l.snapshots[0].counts) > maxCounts {
			t.Fatalf("the count is %d, not %d, of %d", got, n, len(l.snapshots[0].counts))
		}
	}
}
