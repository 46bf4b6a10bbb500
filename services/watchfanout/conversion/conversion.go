// Package convert asks registry for what a replica's bytes are not: other versions of objects, rows of Tables, and the
// fields that only an object's conversion tells.
package conversion

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/query"
)

// Timeout bounds what registry is asked for on behalf of everyone who watches in one form.
const Timeout = 10 * time.Second

// Converter asks, and keeps for a while what it was answered.
type Converter struct {
	source registryv1.SourceClient
	cache  *cache.Cache
	// rows are a Table's, and versions what is as large as objects.
	rows, versions encodingCache
	requests       *prometheus.CounterVec
}

// New returns a converter of a cache's objects.
func New(source registryv1.SourceClient, c *cache.Cache) *Converter {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_watchfanout_encodings_total",
		Help: "Objects asked for as Table rows and in other versions, by whether what registry made was kept.",
	}, []string{"cached"})
	return &Converter{
		source:   source,
		cache:    c,
		rows:     newEncodingCache(requests),
		versions: newEncodingCache(requests),
		requests: requests,
	}
}

// Metrics are this package's collectors.
func (c *Converter) Metrics() []prometheus.Collector {
	return []prometheus.Collector{c.requests, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_watchfanout_encodings_bytes",
		Help: "Bytes that are kept of what registry has made of objects: Table rows and other versions.",
	}, func() float64 { return float64(c.rows.entries.Bytes() + c.versions.entries.Bytes()) })}
}

// Sweep forgets what nobody has asked for for some time.
func (c *Converter) Sweep() {
	c.rows.entries.EvictIdle(rowTTL)
	c.versions.entries.EvictIdle(versionTTL)
}

// AllNative says whether items' own bytes are what a list in the form that q wants has: none is converted.
func AllNative(q *query.Query, items []*cache.Item) bool {
	return !q.Table && !slices.ContainsFunc(items, func(i *cache.Item) bool { return !q.IsNative(i) })
}

// Items are a list's in the form that q wants, and with rows their columns.
func (c *Converter) Items(ctx context.Context, q *query.Query,
	items []*cache.Item) (out *frame.Items, columns []byte, err error) {
	if q.Table {
		rows, err := c.Rows(ctx, q, items)
		if err != nil {
			return nil, nil, err
		}
		return &rows.Items, rows.Columns, nil
	}
	if !AllNative(q, items) {
		bodies, err := c.Convert(ctx, q, items)
		return q.Encoding.Items(bodies), nil, err
	}
	bodies := make([][]byte, len(items))
	for i, item := range items {
		if q.Encoding.Partial && !q.Encoding.Protobuf {
			bodies[i], err = item.ThroughMetadata()
		} else {
			bodies[i], err = q.Encoding.Item(item.JSON, item.Protobuf)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return q.Encoding.Items(bodies), nil, nil
}

const (
	// encodeBatch is how many objects one Encode call carries at most, and encodeBytes about how many bytes of them:
	// what comes back may be some times as much, and a message has a bound.
	encodeBatch = 250
	encodeBytes = 4 << 20
)

// BatchSize is how many of items one Encode call carries: one at least.
func BatchSize(items []*cache.Item) int {
	n, bytes := 0, 0
	for ; n < len(items) && n < encodeBatch; n++ {
		if bytes += items[n].Size(); bytes > encodeBytes && n > 0 {
			break
		}
	}
	return n
}

// Convert is items in the version that q wants. What registry has made lately is not asked for again.
func (c *Converter) Convert(ctx context.Context, q *query.Query, items []*cache.Item) (all [][]byte, err error) {
	k := c.keyOf(q)
	encodings, misses := c.versions.lookup(k, items)
	for len(misses.items) > 0 {
		positions, batch := misses.nextBatch()
		resp, err := c.encode(ctx, q, batch)
		if err != nil {
			return nil, err
		}
		for i, data := range resp.Objects {
			k.serial, encodings[positions[i]] = batch[i].Serial, &encoding{
				data:    data,
				expires: time.Now().Add(versionTTL),
			}
			c.versions.put(k, encodings[positions[i]])
		}
	}
	all = make([][]byte, len(encodings))
	for i, e := range encodings {
		all[i] = e.data
	}
	return all, nil
}

func (c *Converter) encode(ctx context.Context, q *query.Query,
	items []*cache.Item) (*registryv1.EncodeResponse, error) {
	r := &registryv1.EncodeRequest{
		StorageResource: q.Entry.StorageResource,
		Resource:        q.Entry.Resource,
		Output:          q.Output,
		IncludeObject:   q.IncludeObject,
		CrdRevision:     c.crdRevision(q),
	}
	for _, i := range items {
		if q.Encoding.Unstructured {
			r.Json, r.Versions = append(r.Json, i.JSON), append(r.Versions, i.Version)
		} else if len(i.Protobuf) > 0 {
			r.Json, r.Protobuf = append(r.Json, nil), append(r.Protobuf, i.Protobuf)
		} else {
			r.Json, r.Protobuf = append(r.Json, i.JSON), append(r.Protobuf, nil)
		}
	}
	resp, err := c.source.Encode(ctx, r)
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	if len(resp.Objects) != len(items) {
		return nil, status.Errorf(codes.Internal,
			"encode: asked for %d objects, got %d", len(items), len(resp.Objects))
	}
	return resp, nil
}

// Fields are what items' fields are in the version that the query asks for.
func (c *Converter) Fields(ctx context.Context, q *query.Query, items []*cache.Item) ([]map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	r := &registryv1.EncodeRequest{
		StorageResource: q.Entry.StorageResource,
		Resource:        q.Entry.Resource,
		Output:          &registryv1.Output{MediaType: frame.JSON},
		CrdRevision:     c.crdRevision(q),
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
