package convert

import (
	"context"
	"time"
	"unique"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"watershed.dev/platform/frame"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

// A Table's rows are made by registry, and tell how long ago things were. Registry says where in a row that is: the row
// is kept for as long as its object, and its ages are told anew for each who asks. The metadata that rows
// include is cut from the objects' own bytes, and sent from where those are.

// Rows are a Table's.
type Rows struct {
	frame.Items
	Columns []byte
}

// errColumns is answered where registry's replicas do not agree on a Table's columns, as while one release follows
// another.
var errColumns = status.Error(codes.Unavailable, "the Table's columns are changing")

// Rows are the rows of a Table of items, as of now.
func (c *Converter) Rows(ctx context.Context, q *form.Query, items []*cache.Item) (*Rows, error) {
	for range 2 {
		made, columns, err := c.made(ctx, q, items)
		if err != nil {
			return nil, err
		}
		if made != nil {
			return told(q, items, made, columns)
		}
	}
	return nil, errColumns
}

// made are items' rows, and the columns that they have. They are nil where registry has come to have others than those
// that rows are kept of.
func (c *Converter) made(ctx context.Context, q *form.Query,
	items []*cache.Item) (made []*encoding, columns unique.Handle[string], err error) {
	kept := c.rows
	if q.IncludeObject == string(metav1.IncludeObject) {
		kept = c.versions
	}
	ofColumns := c.keyOf(q)
	known, fresh := kept.get(ofColumns, time.Now())
	if known == nil {
		known = &encoding{} // no row is kept of no columns
	}
	k := ofColumns
	k.columns = unique.Make(string(known.data))
	made, todo := kept.find(k, items)
	for asked := fresh; !asked || len(todo.items) > 0; asked = true {
		have := len(items) - len(todo.items)
		at, batch := todo.next()
		resp, err := c.encode(ctx, q, batch)
		if err != nil {
			return nil, k.columns, err
		}
		is := unique.Make(string(resp.Columns))
		kept.put(ofColumns, &encoding{data: resp.Columns, until: time.Now().Add(shortLife)})
		if have > 0 && is != k.columns {
			return nil, is, nil
		}
		k.columns = is
		for i, data := range resp.Objects {
			var ages *registryv1.RowAges
			if i < len(resp.RowAges) {
				ages = resp.RowAges[i]
			}
			e, err := rowOf(q, batch[i], data, ages)
			if err != nil {
				return nil, is, err
			}
			k.serial, made[at[i]] = batch[i].Serial, e
			kept.put(k, e)
		}
	}
	return made, k.columns, nil
}

// age is a part of a row that tells how long ago something was.
type age struct {
	offset, end int
	of          time.Time
}

// rowOf is a row as it is kept: up to the metadata that it includes, or all of it.
func rowOf(q *form.Query, item *cache.Item, data []byte, ages *registryv1.RowAges) (*encoding, error) {
	life := shortLife
	switch {
	case !ages.GetComplete():
	case q.Own(item):
		life = rowLife
	default:
		life = versionLife
	}
	e := &encoding{until: time.Now().Add(life)}
	at := 0
	for _, a := range ages.GetAges() {
		if a.Length < 0 || int(a.Offset) < at || int(a.Offset)+int(a.Length) > len(data) {
			return nil, status.Errorf(codes.Internal, "encode: a row of %d bytes has an age at %d", len(data), a.Offset)
		}
		at = int(a.Offset) + int(a.Length)
		e.ages = append(e.ages, age{int(a.Offset), at, time.Unix(a.Seconds, int64(a.Nanos))})
	}
	var err error
	e.data, err = q.RowHead(data)
	return e, err
}

// told are rows with their ages told as of now.
func told(q *form.Query, items []*cache.Item, made []*encoding, columns unique.Handle[string]) (*Rows, error) {
	out := &Rows{
		Items: frame.Items{
			Heads:  make([][]byte, len(items)),
			Bodies: make([][]byte, len(items)),
			Tail:   q.RowTail(),
		},
		Columns: []byte(columns.Value()),
	}
	size := 0
	for _, e := range made {
		size += len(e.data) + len(e.ages)*maxAge
	}
	all, now, metadata := make([]byte, 0, size), time.Now(), q.RowsHaveMetadata()
	for i, e := range made {
		if len(e.ages) == 0 {
			out.Heads[i] = e.data
		} else {
			from := len(all)
			all = e.tell(all, now)
			out.Heads[i] = all[from:len(all):len(all)]
		}
		if metadata {
			var err error
			if out.Bodies[i], err = items[i].ThroughMetadata(); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// maxAge is the most that an age takes in JSON.
const maxAge = len(invalidAge)

// invalidAge is an age of the future, in JSON.
const invalidAge = `\u003cinvalid\u003e`

// tell appends to dst the row with its ages as of now.
func (e *encoding) tell(dst []byte, now time.Time) []byte {
	at := 0
	for _, a := range e.ages {
		dst = append(dst, e.data[at:a.offset]...)
		text := duration.HumanDuration(now.Sub(a.of))
		if text == "<invalid>" {
			text = invalidAge
		}
		dst = append(dst, text...)
		at = a.end
	}
	return append(dst, e.data[at:]...)
}
