package convert

import (
	"context"
	"time"
	"unique"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	columns, err := c.columns(ctx, q)
	if err != nil {
		return nil, err
	}
	for range 2 {
		var made []*encoding
		if made, columns, err = c.rows(ctx, q, items, columns); err != nil {
			return nil, err
		}
		if made != nil {
			return told(q, items, made, columns)
		}
	}
	return nil, errColumns
}

// columns are the Table's.
func (c *Converter) columns(ctx context.Context, q *form.Query) (unique.Handle[string], error) {
	k := c.keyOf(q)
	if e, ok := c.kept.get(k, time.Now()); ok {
		return e.columns, nil
	}
	resp, err := c.encode(ctx, q, nil)
	if err != nil {
		return k.columns, err
	}
	return c.keepColumns(k, resp), nil
}

func (c *Converter) keepColumns(k key, resp *registryv1.EncodeResponse) unique.Handle[string] {
	e := &encoding{columns: unique.Make(string(resp.Columns)), until: time.Now().Add(shortLife)}
	c.kept.put(k, e)
	return e.columns
}

// rows are items' rows under some columns. They are nil where registry has come to have others, which it then answers.
func (c *Converter) rows(ctx context.Context, q *form.Query, items []*cache.Item,
	columns unique.Handle[string]) ([]*encoding, unique.Handle[string], error) {
	ofColumns, k, now := c.keyOf(q), c.keyOf(q), time.Now()
	k.columns = columns
	made := make([]*encoding, len(items))
	var missing missing
	for i, item := range items {
		var ok bool
		k.serial = item.Serial
		if made[i], ok = c.kept.get(k, now); !ok {
			missing.add(i, item)
		}
	}
	c.kept.count(len(items), len(missing.items))
	for len(missing.items) > 0 {
		at, batch := missing.next()
		resp, err := c.encode(ctx, q, batch)
		if err != nil {
			return nil, columns, err
		}
		if is := c.keepColumns(ofColumns, resp); is != columns {
			return nil, is, nil
		}
		for i, data := range resp.Objects {
			var clock *registryv1.Clock
			if i < len(resp.Clocks) {
				clock = resp.Clocks[i]
			}
			e, err := rowOf(q, data, clock)
			if err != nil {
				return nil, columns, err
			}
			k.serial, made[at[i]] = batch[i].Serial, e
			c.kept.put(k, e)
		}
	}
	return made, columns, nil
}

// age is a part of a row that tells how long ago something was.
type age struct {
	offset, end int
	of          time.Time
}

// rowOf is a row as it is kept: up to the metadata that it includes, or all of it.
func rowOf(q *form.Query, data []byte, clock *registryv1.Clock) (*encoding, error) {
	e := &encoding{until: time.Now().Add(shortLife)}
	if clock.GetAgesOnly() {
		e.until = time.Now().Add(life)
	}
	at := 0
	for _, a := range clock.GetAges() {
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
	all, now := make([]byte, 0, size), time.Now()
	for i, e := range made {
		if len(e.ages) == 0 {
			out.Heads[i] = e.data
		} else {
			from := len(all)
			all = e.tell(all, now)
			out.Heads[i] = all[from:len(all):len(all)]
		}
		if q.RowsHaveMetadata() {
			var err error
			if out.Bodies[i], err = items[i].Metadata(); err != nil {
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
