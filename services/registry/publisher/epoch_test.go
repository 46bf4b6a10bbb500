package publisher

import (
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/services/registry/internal/fixture"
)

// A publisher that lost its log refills it from etcd's history only if the record is its own and etcd was not restored.
func TestCheckpoint(t *testing.T) {
	p := &Publisher{Storage: fixture.New(t).Resources.Storage}
	etcd := p.Storage.Client.Client
	put := func(key string) int64 {
		t.Helper()
		resp, err := etcd.Put(t.Context(), key, "x")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	put("/registry/a")
	last := put("/registry/a")
	now := put("/registry/b")
	const modRev = 7
	h := epoch{ID: "h", Token: "m", Since: 1}
	for name, c := range map[string]struct {
		memory checkpoint
		in     epoch
		same   bool
	}{
		"as it was":            {checkpoint{h, modRev, last, etcdEvent{"/registry/a", last, false}}, h, true},
		"nothing published":    {checkpoint{epoch: h, epochModRevision: modRev, revision: last}, h, true},
		"another token":        {checkpoint{h, modRev, last, etcdEvent{}}, epoch{"h", "n", 1}, false},
		"written by another":   {checkpoint{h, modRev - 1, last, etcdEvent{}}, h, false},
		"nothing written":      {checkpoint{}, h, false},
		"unknown since":        {checkpoint{epoch{"h", "m", 0}, modRev, last, etcdEvent{}}, epoch{"h", "m", 0}, false},
		"etcd is behind":       {checkpoint{h, modRev, now + 1, etcdEvent{}}, h, false},
		"etcd lacks the event": {checkpoint{h, modRev, last, etcdEvent{"/registry/b", last, false}}, h, false},
		"it is in the future":  {checkpoint{h, modRev, last, etcdEvent{"/registry/a", now + 9, false}}, h, false},
		"it was deleted here":  {checkpoint{h, modRev, last, etcdEvent{"/registry/a", last, true}}, h, false},
	} {
		p.checkpoint = c.memory
		if reason, err := p.matchesCheckpoint(t.Context(), c.in, modRev, now); err != nil || (reason == "") != c.same {
			t.Errorf("%s: %q, %v", name, reason, err)
		}
	}
	for limit, want := range map[int64]int64{1 << 40: 1, 2: now - 2} {
		if got, err := p.oldestRevision(t.Context(), now, limit); err != nil || got != want {
			t.Errorf("the oldest of the last %d revisions is %d, not %d (%v)", limit, got, want, err)
		}
	}
	if _, err := etcd.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.oldestRevision(t.Context(), now, 1<<40); err != nil || got != last {
		t.Errorf("the oldest revision after a compaction is %d, not %d (%v)", got, last, err)
	}
}
