package list

import (
	"context"
	"fmt"
	"testing"

	"watershed.dev/platform/watchcache/cache"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// The snapshots of paged lists pin a bounded number of bytes of replaced objects, whatever is written meanwhile. The
// snapshots that pin most are dropped, and registry continues their lists.
func TestCachedSnapshotsAreBoundedInBytes(t *testing.T) {
	s := New(nil, cache.New(64<<20, 0), nil, nil, 0)
	load := func(context.Context, string) ([]*registryv1.Row, int64, error) { return nil, 1, nil }
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
	s.putSnapshot("small", "h", snapshot(small))
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
			s.putSnapshot("configmaps", "h", snapshot(configmaps))
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
