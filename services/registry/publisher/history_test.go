package publisher

import (
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/services/registry/internal/world"
)

// A publisher that lost its log goes on with etcd's past only where that is what it published: the mark is its own, and
// etcd was not set back since.
func TestAPublisherRemembersItsHistory(t *testing.T) {
	p := &Publisher{Storage: world.New(t).Resources.Storage}
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
	const at = 7
	h := history{ID: "h", Mark: "m", Since: 1}
	for name, c := range map[string]struct {
		memory memory
		in     history
		same   bool
	}{
		"as it was":               {memory{h, at, last, happening{"/registry/a", last, false}}, h, true},
		"nothing published":       {memory{history: h, written: at, revision: last}, h, true},
		"another mark":            {memory{h, at, last, happening{}}, history{"h", "n", 1}, false},
		"another wrote it again":  {memory{h, at - 1, last, happening{}}, h, false},
		"nothing written":         {memory{}, h, false},
		"nobody knows since when": {memory{history{"h", "m", 0}, at, last, happening{}}, history{"h", "m", 0}, false},
		"etcd is behind":          {memory{h, at, now + 1, happening{}}, h, false},
		"etcd lacks the event":    {memory{h, at, last, happening{"/registry/b", last, false}}, h, false},
		"etcd has not come to it": {memory{h, at, last, happening{"/registry/a", now + 9, false}}, h, false},
		"it was deleted here":     {memory{h, at, last, happening{"/registry/a", last, true}}, h, false},
	} {
		p.memory = c.memory
		if reason, err := p.remembers(t.Context(), c.in, at, now); err != nil || (reason == "") != c.same {
			t.Errorf("%s: %q, %v", name, reason, err)
		}
	}
	for most, want := range map[int64]int64{1 << 40: 1, 2: now - 2} {
		if got, err := p.oldest(t.Context(), now, most); err != nil || got != want {
			t.Errorf("of the last %d revisions the first is %d, not %d (%v)", most, got, want, err)
		}
	}
	if _, err := etcd.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.oldest(t.Context(), now, 1<<40); err != nil || got != last {
		t.Errorf("of what is left the first is %d, not %d (%v)", got, last, err)
	}
}
