package frame

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// List holds the fields of a list body other than its items.
type List struct {
	Kind, APIVersion string
	Revision         int64
	Continue         string
	Remaining        *int64
	// ShardInfo is the selector of the list's shard. Empty: the list has no shardInfo.
	ShardInfo string
	// Columns, if set, makes the list a Table.
	Columns []byte
	// Unstructured is true for a list without a Go type. Its metadata always has a continue token, possibly empty.
	Unstructured bool
}

func (l *List) meta(dst []byte) []byte {
	dst = append(dst, `"metadata":{"resourceVersion":"`...)
	dst = strconv.AppendInt(dst, l.Revision, 10)
	dst = append(dst, '"')
	if l.Continue != "" || l.Unstructured {
		dst = append(append(append(dst, `,"continue":"`...), l.Continue...), '"')
	}
	if l.Remaining != nil {
		dst = strconv.AppendInt(append(dst, `,"remainingItemCount":`...), *l.Remaining, 10)
	}
	if l.ShardInfo != "" {
		dst = append(strconv.AppendQuote(append(dst, `,"shardInfo":{"selector":`...), l.ShardInfo), '}')
	}
	return append(dst, '}')
}

// headJSON returns a list body up to its first item.
func (l *List) headJSON() []byte {
	b := fmt.Appendf(nil, `{"kind":%q,"apiVersion":%q,`, l.Kind, l.APIVersion)
	b = l.meta(b)
	if l.Columns != nil {
		b = append(append(b, `,"columnDefinitions":`...), l.Columns...)
		return append(b, `,"rows":[`...)
	}
	return append(b, `,"items":[`...)
}

// tailJSON follows the last item.
var tailJSON = []byte("]}\n")

// nullJSON ends a list without items whose items are null.
var nullJSON = []byte("null}\n")

var comma = []byte{','}

// Bodies holds the items of a list.
type Bodies interface {
	// Len returns the number of items.
	Len() int
	// Size returns the size of item n in bytes. It does not need the item's bytes.
	Size(n int) int
	// Bytes returns item n.
	Bytes(n int) []byte
}

// Slices are bodies in memory.
type Slices [][]byte

// Len implements Bodies.
func (s Slices) Len() int { return len(s) }

// Size implements Bodies.
func (s Slices) Size(n int) int { return len(s[n]) }

// Bytes implements Bodies.
func (s Slices) Bytes(n int) []byte { return s[n] }

// Items holds the items of a list, each as head, body and tail. In protobuf an item is its body only.
type Items struct {
	// Bodies holds the items, without the parts that are in their heads and in the tail.
	Bodies
	// Head precedes each item in JSON and replaces the opening brace of its body. nil: no head.
	Head []byte
	// Heads, if set, has a head for each item, instead of Head. A body may then be empty.
	Heads [][]byte
	// Tail follows each item in JSON.
	Tail []byte
}

func (i *Items) head(n int) []byte {
	if i.Heads != nil {
		return i.Heads[n]
	}
	return i.Head
}

// pieces returns the parts of item n.
func (i *Items) pieces(n int) (head, body, tail []byte) {
	head, body = i.head(n), i.Bytes(n)
	if head != nil && len(body) > 0 {
		body = body[1:]
	}
	return head, body, i.Tail
}

// jsonSize returns the size of item n with its head and its tail, in bytes.
func (i *Items) jsonSize(n int) int {
	head, body := i.head(n), i.Size(n)
	if head != nil && body > 0 {
		body--
	}
	return len(head) + body + len(i.Tail)
}

// JSON returns a copy of item n, in JSON.
func (i *Items) JSON(n int) []byte {
	return slices.Concat(i.pieces(n))
}

// Body is a list body: Head, the items, and Tail.
type Body struct {
	Head, Tail []byte
	// Size is the size of the whole body in bytes.
	Size int64

	// Items are the items between Head and Tail.
	Items *Items

	protobuf bool
}

// Body returns the list body with the items, in JSON or protobuf.
func (l *List) Body(protobuf bool, items *Items) *Body {
	b := &Body{Items: items, protobuf: protobuf}
	n := 0
	for i := range items.Len() {
		n += b.ItemBytes(i)
	}
	switch {
	case protobuf:
		b.Head, b.Tail = l.headProtobuf(n), TailProtobuf
	case items.Len() == 0 && l.Kind == "PartialObjectMetadataList": // kube-apiserver writes null
		head := l.headJSON()
		b.Head, b.Tail = head[:len(head)-1], nullJSON
	default:
		b.Head, b.Tail = l.headJSON(), tailJSON
	}
	b.Size = int64(len(b.Head) + n + len(b.Tail))
	return b
}

// ItemBytes returns the size of item i in the body, in bytes.
func (b *Body) ItemBytes(i int) int {
	if b.protobuf {
		return fieldLen(b.Items.Size(i))
	}
	n := b.Items.jsonSize(i)
	if i < b.Items.Len()-1 {
		n++
	}
	return n
}

// Run appends the bytes of the items from first up to end, as the body contains them. Only the bytes of the list's last
// item depend on its position.
func (b *Body) Run(pieces [][]byte, first, end int) [][]byte {
	for i := first; i < end; i++ {
		if b.protobuf {
			item := b.Items.Bytes(i)
			pieces = append(pieces, itemHeadProtobuf(len(item)), item)
			continue
		}
		head, body, tail := b.Items.pieces(i)
		for _, p := range [...][]byte{head, body, tail} {
			if len(p) > 0 {
				pieces = append(pieces, p)
			}
		}
		if i < b.Items.Len()-1 {
			pieces = append(pieces, comma)
		}
	}
	return pieces
}

// Send sends the body to w, and ends w. It returns early if ctx ends, because small parts of large objects take a while
// to read.
func (b *Body) Send(ctx context.Context, w *Chunks) error {
	w.Begin(b.Size)
	err := w.Add(b.Head)
	var pieces [][]byte
	for i := 0; i < b.Items.Len() && err == nil; i++ {
		pieces = b.Run(pieces[:0], i, i+1)
		for _, p := range pieces {
			err = w.Add(p)
		}
		if err == nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		return err
	}
	_ = w.Add(b.Tail)
	return w.End()
}

// itemHeadProtobuf returns the head of an item of n bytes in a protobuf list.
func itemHeadProtobuf(n int) []byte { return tag(nil, 2, n) }

// headProtobuf returns a list body up to its first item. items is the size of all items with their heads.
func (l *List) headProtobuf(items int) []byte {
	var m []byte
	m = tag(m, 1, 0) // selfLink, always written
	rv := strconv.FormatInt(l.Revision, 10)
	m = append(tag(m, 2, len(rv)), rv...)
	m = append(tag(m, 3, len(l.Continue)), l.Continue...)
	if l.Remaining != nil {
		m = protowire.AppendVarint(protowire.AppendTag(m, 4, protowire.VarintType), uint64(*l.Remaining))
	}
	if l.ShardInfo != "" {
		m = tag(m, 5, fieldLen(len(l.ShardInfo)))
		m = append(tag(m, 1, len(l.ShardInfo)), l.ShardInfo...)
	}
	return envelopeHead(l.Kind, l.APIVersion, fieldLen(len(m))+items, func(b []byte) []byte {
		return append(tag(b, 1, len(m)), m...)
	})
}
