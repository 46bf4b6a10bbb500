package logreader

import (
	"context"
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/cache"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// A message without a checksum may have any bytes. The reader applies its events, progress, sums and resets without a
// panic. A reset of all then restores the cache.
func FuzzApply(f *testing.F) {
	batch := func(events ...*logv1.Event) (data []byte) {
		for _, e := range events {
			b, err := proto.Marshal(e)
			if err != nil {
				f.Fatal(err)
			}
			data = protowire.AppendBytes(protowire.AppendTag(data, 1, protowire.BytesType), b)
		}
		return data
	}
	object := &logv1.Object{Json: []byte("{}"), Labels: map[string]string{"a": "b"}}
	for _, events := range [][]*logv1.Event{
		{{Type: logv1.Type_TYPE_ADDED, Revision: 11, StorageResource: "pods", Name: "a", Object: object}},
		{{Type: logv1.Type_TYPE_MODIFIED, Revision: 11, StorageResource: "pods", Name: "a", Object: object,
			Previous: object, More: true},
			{Type: logv1.Type_TYPE_RESET, Revision: 11, Index: 2, StorageResource: "pods", CrdChanged: true}},
		{{Revision: 12, Sums: &logv1.Sums{Term: 1, Changes: map[string]uint64{"pods": 5}}},
			{Revision: 12, Sums: &logv1.Sums{Term: 1, Changes: map[string]uint64{"pods": 6}}}},
		{{Type: logv1.Type_TYPE_RESET, Revision: 1 << 62, Epoch: "other"}, {Type: 9, Revision: -1}},
		{{Type: logv1.Type_TYPE_DELETED, Revision: 11, Index: -1, StorageResource: "pods", Name: "b"}},
		{{Type: logv1.Type_TYPE_ADDED, Revision: 11, StorageResource: "pods", Encrypted: &logv1.Encrypted{Key: "k"}}},
	} {
		f.Add(batch(events...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		events, err := eventlog.Events(nats.Header{"Nats-Msg-Id": {"11.0.p-1"}, "Content-Encoding": {"batch"}}, data)
		if err != nil {
			return
		}
		l := newReader(Source{Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
			add(&registryv1.Row{Name: "a", Revision: 9, Json: []byte("{}")})
			return 10, nil
		}})
		reset := &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10, Epoch: "e"}
		l.cache.Apply(reset)
		pods := l.cache.Resource("pods")
		if _, err := l.Snapshot(t.Context(), pods, "metadata.name"); err != nil {
			t.Fatal(err)
		}
		named := pods.Subscribe(cache.Trigger{Field: cache.ByKey, Value: "a"})
		defer named.Close()
		cursor, _, _ := named.After(10, 0)
		noKey := func(context.Context, string, string) ([]byte, error) { return nil, eventlog.ErrNoKey }
		apply := eventlog.WithDecryption(t.Context(), noKey, l.apply)
		for _, e := range events {
			if err := apply(e); err != nil && !errors.Is(err, eventlog.ErrNoKey) {
				t.Fatal(err)
			}
			named.Next(cursor, 10)
			l.cache.Sweep()
		}
		reset.Epoch = "restored"
		if err := l.apply(reset); err != nil || l.cache.Progress() != 10 {
			t.Fatalf("after a reset to 10, the cache is at %d: %v", l.cache.Progress(), err)
		}
		if s, err := l.Snapshot(t.Context(), pods, ""); err != nil || s.Len() != 1 {
			t.Error(err)
		}
	})
}
