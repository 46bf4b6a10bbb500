package list

import (
	"context"
	"path"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/logreader"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A continue token decodes to a key under the list's own prefix, or is delegated. An encoded token decodes to the same
// key.
func FuzzContinue(f *testing.F) {
	f.Add(encodeContinue(12, "/ns/name\x00"))
	f.Add("eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiIvLi4vc2VjcmV0cyJ9")
	f.Fuzz(func(t *testing.T, token string) {
		revision, start, err := decodeContinue(token)
		if err != nil {
			return
		}
		if revision <= 0 || strings.HasPrefix(start, "/") || path.Clean("/"+start) != "/"+start {
			t.Errorf("%q leads to %q at %d", token, start, revision)
		}
	})
}

// FuzzSnapshot checks that a list of any rows of registry is a list or an error, and that it has each object.
func FuzzSnapshot(f *testing.F) {
	for _, rows := range [][]*registryv1.Row{
		{{Namespace: "x", Name: "a", Revision: 3, Json: []byte(`{"metadata":{"name":"a"}}`)}},
		{{Namespace: "x", Name: "a", Json: []byte(`{"metadata":{}}`), Labels: map[string]string{"node": "\xff"}},
			{Namespace: "x", Name: "a", Revision: 4, Unreadable: "rubbish"}},
		{{Namespace: "x/y", Json: []byte(`{`)}, {Name: "x", Json: []byte(`[]`), Protobuf: []byte{0}, Version: "v9"}},
	} {
		data, err := proto.Marshal(&registryv1.SnapshotChunk{Rows: rows})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	w := fixture.New(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		chunk := &registryv1.SnapshotChunk{}
		if proto.Unmarshal(data, chunk) != nil {
			return
		}
		c := cache.New(1<<20, 0)
		c.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10})
		reader := logreader.New(c, nil, logreader.Source{
			Revision: func(context.Context) (int64, error) { return 10, nil },
			Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
				for _, row := range chunk.Rows {
					add(row)
				}
				return 10, nil
			},
		}, &lifecycle.Readiness{}, logreader.Config{})
		l := New(w.Discovery, c, reader, w.Converter, 0)
		table, metadata := fixture.Table(fixture.Query()), fixture.Query()
		metadata.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadataList"}
		for _, q := range []*watchfanoutv1.Query{fixture.Query(), table, metadata} {
			for _, namespace := range []string{"", "x"} {
				q.Namespace = namespace
				_ = l.List(&watchfanoutv1.ListRequest{Query: q, Limit: 1}, discard{ctx: t.Context()})
				_ = l.List(&watchfanoutv1.ListRequest{Query: q, Gzip: true}, discard{ctx: t.Context()})
			}
		}
	})
}

// discard is a client that drops a list.
type discard struct {
	grpc.ServerStreamingServer[watchfanoutv1.ListChunk]
	ctx context.Context
}

func (d discard) Context() context.Context { return d.ctx }

func (discard) Send(*watchfanoutv1.ListChunk) error { return nil }
