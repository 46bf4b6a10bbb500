// Package conversion requests encodings from registry that the cache does not have: other versions of objects, Table
// rows, and fields that need a conversion. It caches the encodings and decodes nothing itself. It has no goroutines of
// its own.
package conversion

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Timeout bounds a request to registry on behalf of all watches with the same encoding.
const Timeout = 10 * time.Second

// Encode requests encodings. It is registry's Source.Encode.
type Encode func(context.Context, *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error)

// Remote returns the Encode of a replica that calls registry.
func Remote(registry registryv1.SourceClient) Encode {
	return func(ctx context.Context, r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
		return registry.Encode(ctx, r)
	}
}

// Rejection is registry's error for an object that it cannot convert. A conversion webhook has failed, for example.
type Rejection struct{ *apierrors.StatusError }

// fromStatus returns the error of a request to registry. It is a Rejection if registry responded with the code 500.
func fromStatus(err error) error {
	var api *apierrors.StatusError
	result := rpc.FromStatus(err)
	if rpc.HasAPIError(err) && errors.As(result, &api) && api.ErrStatus.Code == http.StatusInternalServerError {
		return Rejection{api}
	}
	return result
}

// Converter requests encodings from registry and caches them.
type Converter struct {
	request Encode
	cache   *cache.Cache
	// rows caches Table rows. versions caches encodings as large as objects.
	rows, versions encodingCache
	requests       *prometheus.CounterVec
}

// New returns a converter of the objects of c. It caches rows of at most bytes, and again as many bytes of encodings as
// large as objects.
func New(request Encode, c *cache.Cache, bytes int) *Converter {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_watchfanout_encodings_total",
		Help: "Encodings of objects as Table rows and in other versions, by whether the cache had them.",
	}, []string{"cached"})
	return &Converter{
		request:  request,
		cache:    c,
		rows:     newEncodingCache(bytes, requests),
		versions: newEncodingCache(bytes, requests),
		requests: requests,
	}
}

// Metrics are this package's collectors.
func (c *Converter) Metrics() []prometheus.Collector {
	return []prometheus.Collector{c.requests, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_watchfanout_encodings_bytes",
		Help: "Bytes of cached encodings: Table rows and objects in other versions.",
	}, func() float64 { return float64(c.rows.entries.Bytes() + c.versions.entries.Bytes()) })}
}

// Sweep evicts encodings that were not requested lately.
func (c *Converter) Sweep() {
	c.rows.entries.EvictIdle(rowTTL)
	c.versions.entries.EvictIdle(versionTTL)
}

// AllNative reports whether a list with q's encoding consists of the items' own bytes, without a conversion.
func AllNative(q *query.Query, items []*cache.Item) bool {
	return !q.Table && !slices.ContainsFunc(items, func(i *cache.Item) bool { return !q.IsNative(i) })
}

// Items returns the items in q's encoding and, for a Table, its columns.
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
		return q.Encoding.Items(frame.Slices(bodies)), nil, err
	}
	bodies, err := bodiesOf(q, items)
	if err != nil {
		return nil, nil, err
	}
	return q.Encoding.Items(bodies), nil, nil
}

const (
	// encodeBatch bounds the objects of one Encode call, and encodeBytes their bytes, approximately. The response may
	// be several times as large, and gRPC bounds a message.
	encodeBatch = 250
	encodeBytes = 4 << 20
)

// BatchSize returns how many of items one Encode call carries: at least one.
func BatchSize(items []*cache.Item) int {
	n, bytes := 0, 0
	for ; n < len(items) && n < encodeBatch; n++ {
		if bytes += items[n].Size(); bytes > encodeBytes && n > 0 {
			break
		}
	}
	return n
}

// Convert returns the items in q's version. It requests from registry only encodings that are not cached.
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
			r.Json, r.Versions = append(r.Json, i.JSON()), append(r.Versions, i.Version)
		} else if i.ProtobufSize() > 0 {
			r.Json, r.Protobuf = append(r.Json, nil), append(r.Protobuf, i.Protobuf())
		} else {
			r.Json, r.Protobuf = append(r.Json, i.JSON()), append(r.Protobuf, nil)
		}
	}
	resp, err := c.request(ctx, r)
	if err != nil {
		return nil, fromStatus(err)
	}
	if len(resp.Objects) != len(items) {
		return nil, status.Errorf(codes.Internal,
			"encode: requested %d objects, got %d", len(items), len(resp.Objects))
	}
	return resp, nil
}

// Fields returns the items' selectable fields in q's version.
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
		r.Json, r.Versions = append(r.Json, i.JSON()), append(r.Versions, i.Version)
	}
	resp, err := c.request(ctx, r)
	if err != nil {
		return nil, fromStatus(err)
	}
	if len(resp.Fields) != len(items) {
		return nil, status.Errorf(codes.Internal, "requested the fields of %d objects, got %d",
			len(items), len(resp.Fields))
	}
	out := make([]map[string]string, len(items))
	for i, f := range resp.Fields {
		out[i] = f.Fields
	}
	return out, nil
}
