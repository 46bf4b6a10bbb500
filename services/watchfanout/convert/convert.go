// Package convert asks registry for what a replica's bytes are not: other versions of objects, rows of Tables, and the
// fields that only an object's conversion tells.
package convert

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

// Timeout bounds what registry is asked for on behalf of everyone who watches in one form.
const Timeout = 10 * time.Second

// Converter asks, and keeps for a while what it was answered.
type Converter struct {
	source         registryv1.SourceClient
	cache          *cache.Cache
	rows, versions encodings
}

// New returns a converter of a cache's objects.
func New(source registryv1.SourceClient, c *cache.Cache) *Converter {
	return &Converter{
		source:   source,
		cache:    c,
		rows:     encodings{life: rowsLife, limit: encodingsSize},
		versions: encodings{life: versionsLife, limit: encodingsSize},
	}
}

// AsTheyAre says whether items' own bytes are what a list in the form that q wants has: none is converted.
func AsTheyAre(q *form.Query, items []*cache.Item) bool {
	return !q.Table && !slices.ContainsFunc(items, func(i *cache.Item) bool { return !q.Own(i) })
}

// Parts are the encoded items of a list in the form that q wants.
func (c *Converter) Parts(ctx context.Context, q *form.Query,
	items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	if !AsTheyAre(q, items) {
		return c.Encoded(ctx, q, items)
	}
	parts = make([][]byte, len(items))
	for i, item := range items {
		if parts[i], err = q.Form.Item(item.JSON, item.Protobuf); err != nil {
			return nil, nil, err
		}
	}
	return parts, nil, nil
}

const (
	// encodeBatch is how many objects one Encode call carries at most, and encodeBytes about how many bytes of them:
	// what comes back may be some times as much, and a message has a bound.
	encodeBatch = 250
	encodeBytes = 4 << 20
)

// Batch is how many of items one Encode call carries: one at least.
func Batch(items []*cache.Item) int {
	n, bytes := 0, 0
	for ; n < len(items) && n < encodeBatch; n++ {
		if bytes += items[n].Size(); bytes > encodeBytes && n > 0 {
			break
		}
	}
	return n
}

// Encoded is what registry makes of items: other versions, and Table rows. What it has made lately is not asked for
// again.
func (c *Converter) Encoded(ctx context.Context, q *form.Query,
	items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	kept := &c.versions
	if q.Table {
		kept = &c.rows
	}
	parts = make([][]byte, len(items))
	var missing []*cache.Item
	var at []int
	for i, item := range items {
		var ok bool
		if parts[i], ok = kept.get(encodingKey{item, q.Key}); !ok {
			missing, at = append(missing, item), append(at, i)
		}
	}
	columns, ok := kept.get(encodingKey{nil, q.Key})
	for first := !ok; first || len(missing) > 0; first = false {
		n := Batch(missing)
		var made [][]byte
		if made, columns, err = c.encode(ctx, q, missing[:n]); err != nil {
			return nil, nil, err
		}
		for i, data := range made {
			parts[at[i]] = data
			kept.put(encodingKey{missing[i], q.Key}, data)
		}
		missing, at = missing[n:], at[n:]
		kept.put(encodingKey{nil, q.Key}, columns)
	}
	return parts, columns, nil
}

func (c *Converter) encode(ctx context.Context, q *form.Query,
	items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	r := &registryv1.EncodeRequest{
		StoredAs:      q.Entry.StoredAs,
		Resource:      q.Entry.Resource,
		Output:        q.Output,
		IncludeObject: q.IncludeObject,
		DefinedAt:     c.cache.Resource(q.Entry.StoredAs).Redefined(),
	}
	for _, i := range items {
		if q.Form.Unstructured {
			r.Json, r.Versions = append(r.Json, i.JSON), append(r.Versions, i.Version)
		} else if len(i.Protobuf) > 0 {
			r.Json, r.Protobuf = append(r.Json, nil), append(r.Protobuf, i.Protobuf)
		} else {
			r.Json, r.Protobuf = append(r.Json, i.JSON), append(r.Protobuf, nil)
		}
	}
	resp, err := c.source.Encode(ctx, r)
	if err != nil {
		return nil, nil, rpc.FromStatus(err)
	}
	if len(resp.Objects) != len(items) {
		return nil, nil, status.Errorf(codes.Internal,
			"encode: asked for %d objects, got %d", len(items), len(resp.Objects))
	}
	if q.Table && q.IncludeObject != string(metav1.IncludeObject) && q.IncludeObject != string(metav1.IncludeNone) {
		for i := range resp.Objects {
			if resp.Objects[i], err = q.WithMetadata(resp.Objects[i], items[i].JSON); err != nil {
				return nil, nil, err
			}
		}
	}
	return resp.Objects, resp.Columns, nil
}

// Fields are what items' fields are in the version that the query asks for. It goes on though ctx ends: others wait for
// it too.
func (c *Converter) Fields(ctx context.Context, q *form.Query, items []*cache.Item) ([]map[string]string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Timeout)
	defer cancel()
	r := &registryv1.EncodeRequest{
		StoredAs:  q.Entry.StoredAs,
		Resource:  q.Entry.Resource,
		Output:    &registryv1.Output{MediaType: frame.JSON},
		DefinedAt: c.cache.Resource(q.Entry.StoredAs).Redefined(),
	}
	for _, i := range items {
		r.Json, r.Versions = append(r.Json, i.JSON), append(r.Versions, i.Version)
	}
	resp, err := c.source.Encode(ctx, r)
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	if len(resp.Fields) != len(items) {
		return nil, status.Errorf(codes.Internal, "asked for the fields of %d objects, got %d",
			len(items), len(resp.Fields))
	}
	out := make([]map[string]string, len(items))
	for i, f := range resp.Fields {
		out[i] = f.Fields
	}
	return out, nil
}
