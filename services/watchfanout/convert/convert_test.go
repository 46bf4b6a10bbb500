package convert_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/convert"
	"watershed.dev/services/watchfanout/form"
)

// registry encodes an object as its number among all that it was asked for, and says how many it was asked for at a
// time.
type registry struct {
	registryv1.SourceClient
	asked []int
	short bool
}

func (r *registry) Encode(_ context.Context, m *registryv1.EncodeRequest,
	_ ...grpc.CallOption) (*registryv1.EncodeResponse, error) {
	r.asked = append(r.asked, len(m.Json))
	out := &registryv1.EncodeResponse{Columns: []byte("[]")}
	for _, o := range m.Json {
		out.Objects = append(out.Objects, fmt.Appendf(nil, `{"cells":[%d],"object":null}`, len(o)))
	}
	if r.short {
		out.Objects = out.Objects[1:]
	}
	return out, nil
}

// inV1 asks for pods, which are stored in v2, in v1.
func inV1(t *testing.T) *form.Query {
	t.Helper()
	q, err := form.NewQuery(&registryv1.ResourceEntry{
		StoredAs:   "pods",
		Resource:   &commonv1.Resource{Version: "v1", Resource: "pods"},
		Kind:       &commonv1.Kind{Version: "v1", Kind: "Pod"},
		StoredKind: &commonv1.Kind{Version: "v2", Kind: "Pod"},
	}, &watchfanoutv1.Query{Output: &registryv1.Output{MediaType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func items(n, bytes int) (all []*cache.Item) {
	for i := range n {
		all = append(all, &cache.Item{Key: fmt.Sprint(i), JSON: []byte(strings.Repeat("x", bytes+i))})
	}
	return all
}

// Registry is asked for so many objects at a time, and for none twice.
func TestObjectsAreAskedForInBatches(t *testing.T) {
	for name, c := range map[string]struct {
		items []*cache.Item
		asked string
	}{
		"none":   {nil, "[0]"}, // for the columns
		"many":   {items(600, 10), "[250 250 100]"},
		"large":  {items(5, 2<<20), "[1 1 1 1 1]"},
		"middle": {items(5, 1<<20), "[3 2]"},
	} {
		r := &registry{}
		converter := convert.New(r, cache.New(1<<20, 0))
		q := inV1(t)
		for range 2 {
			parts, _, err := converter.Encoded(t.Context(), q, c.items)
			if err != nil || len(parts) != len(c.items) {
				t.Fatalf("%s: %d parts, %v", name, len(parts), err)
			}
			for i, p := range parts {
				if want := fmt.Sprintf(`{"cells":[%d],"object":null}`, len(c.items[i].JSON)); string(p) != want {
					t.Errorf("%s: %d is %s, not %s", name, i, p, want)
				}
			}
		}
		if got := fmt.Sprint(r.asked); got != c.asked {
			t.Errorf("%s: asked for %s, not %s", name, got, c.asked)
		}
	}
}

// An answer that lacks an object is an error, and nobody is shown another object's bytes.
func TestAShortAnswerIsAnError(t *testing.T) {
	converter := convert.New(&registry{short: true}, cache.New(1<<20, 0))
	if _, _, err := converter.Encoded(t.Context(), inV1(t), items(3, 1)); status.Code(err) != codes.Internal {
		t.Errorf("%v", err)
	}
	if _, err := converter.Fields(t.Context(), inV1(t), items(3, 1)); status.Code(err) != codes.Internal {
		t.Errorf("%v", err)
	}
}
