package conversion

import (
	"context"
	"time"
	"unique"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// registry prints a Table's rows, whose cells include ages. It marks each age and the timestamp that it is computed
// from. A row is therefore cached with its object, and its ages are recomputed for each response. The metadata in a row
// is a slice of the object's own bytes.

// Rows are the rows and columns of a Table.
type Rows struct {
	frame.Items
	Columns []byte
}

// errColumns is returned if registry's replicas disagree on a Table's columns, as they may during a rolling upgrade.
var errColumns = status.Error(codes.Unavailable, "the Table's columns are changing")

// Rows returns the Table rows of items, with ages computed now.
func (c *Converter) Rows(ctx context.Context, q *query.Query, items []*cache.Item) (*Rows, error) {
	for range 2 {
		rows, columns, err := c.encodeRows(ctx, q, items)
		if err != nil {
			return nil, err
		}
		if rows != nil {
			return renderRows(q, items, rows, columns)
		}
	}
	return nil, errColumns
}

// encodeRows returns the items' rows and their columns. rows is nil if registry's columns differ from those of the
// cached rows.
func (c *Converter) encodeRows(ctx context.Context, q *query.Query,
	items []*cache.Item) (rows []*encoding, columns unique.Handle[string], err error) {
	encodings := c.rows
	if q.IncludeObject == string(metav1.IncludeObject) {
		encodings = c.versions
	}
	columnsKey := c.keyOf(q)
	cachedColumns, fresh := encodings.get(columnsKey, time.Now())
	if cachedColumns == nil {
		cachedColumns = &encoding{} // no row has empty columns
	}
	k := columnsKey
	k.columns = unique.Make(string(cachedColumns.data))
	rows, misses := encodings.lookup(k, items)
	for requested := fresh; !requested || len(misses.items) > 0; requested = true {
		hits := len(items) - len(misses.items)
		positions, batch := misses.nextBatch()
		resp, err := c.encode(ctx, q, batch)
		if err != nil {
			return nil, k.columns, err
		}
		newColumns := unique.Make(string(resp.Columns))
		encodings.put(columnsKey, &encoding{data: resp.Columns, expires: time.Now().Add(shortTTL)})
		if hits > 0 && newColumns != k.columns {
			return nil, newColumns, nil
		}
		k.columns = newColumns
		for i, data := range resp.Objects {
			var ages *registryv1.RowAges
			if i < len(resp.RowAges) {
				ages = resp.RowAges[i]
			}
			e, err := rowOf(q, batch[i], data, ages)
			if err != nil {
				return nil, newColumns, err
			}
			k.serial, rows[positions[i]] = batch[i].Serial, e
			encodings.put(k, e)
		}
	}
	return rows, k.columns, nil
}

// age is the position of an age in a row, and the timestamp that it is computed from.
type age struct {
	offset, end int
	timestamp   time.Time
}

// rowOf returns a row as it is cached: up to its metadata, or the whole row if it has none.
func rowOf(q *query.Query, item *cache.Item, data []byte, ages *registryv1.RowAges) (*encoding, error) {
	ttl := shortTTL
	switch {
	case !ages.GetComplete():
	case q.IsNative(item):
		ttl = rowTTL
	default:
		ttl = versionTTL
	}
	e := &encoding{expires: time.Now().Add(ttl)}
	pos := 0
	for _, a := range ages.GetAges() {
		if a.Length < 0 || int(a.Offset) < pos || int(a.Offset)+int(a.Length) > len(data) {
			return nil, status.Errorf(codes.Internal, "encode: a row of %d bytes has an age at %d", len(data), a.Offset)
		}
		pos = int(a.Offset) + int(a.Length)
		e.ages = append(e.ages, age{int(a.Offset), pos, time.Unix(a.Seconds, int64(a.Nanos))})
	}
	var err error
	e.data, err = q.RowHead(data)
	return e, err
}

// renderRows returns the rows with ages computed now.
func renderRows(q *query.Query, items []*cache.Item, rows []*encoding, columns unique.Handle[string]) (*Rows, error) {
	out := &Rows{
		Items: frame.Items{
			Heads:  make([][]byte, len(items)),
			Bodies: make(frame.Slices, len(items)),
			Tail:   q.RowTail(),
		},
		Columns: []byte(columns.Value()),
	}
	size := 0
	for _, e := range rows {
		size += len(e.data) + len(e.ages)*maxAge
	}
	if q.RowsHaveMetadata() {
		var err error
		if out.Bodies, err = metadataOf(q, items); err != nil {
			return nil, err
		}
	}
	all, now := make([]byte, 0, size), time.Now()
	for i, e := range rows {
		if len(e.ages) == 0 {
			out.Heads[i] = e.data
		} else {
			from := len(all)
			all = e.appendRow(all, now)
			out.Heads[i] = all[from:len(all):len(all)]
		}
	}
	return out, nil
}

// maxAge is the maximum length of an age in JSON.
const maxAge = len(invalidAge)

// invalidAge is the age of a future timestamp, in JSON.
const invalidAge = `\u003cinvalid\u003e`

// appendRow appends the row to dst, with ages computed at now.
func (e *encoding) appendRow(dst []byte, now time.Time) []byte {
	pos := 0
	for _, a := range e.ages {
		dst = append(dst, e.data[pos:a.offset]...)
		text := duration.HumanDuration(now.Sub(a.timestamp))
		if text == "<invalid>" {
			text = invalidAge
		}
		dst = append(dst, text...)
		pos = a.end
	}
	return append(dst, e.data[pos:]...)
}
