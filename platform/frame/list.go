package frame

import (
	"fmt"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// List is what a list's body says beside its items.
type List struct {
	Kind, APIVersion string
	Revision         int64
	Continue         string
	Remaining        *int64
	// Columns makes it a Table.
	Columns []byte
	// Unstructured: the list has no Go type, and says of its continue token even where it has none.
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
	return append(dst, '}')
}

// headJSON is a list's body up to its first item.
func (l *List) headJSON() []byte {
	b := fmt.Appendf(nil, `{"kind":%q,"apiVersion":%q,`, l.Kind, l.APIVersion)
	b = l.meta(b)
	if l.Columns != nil {
		b = append(append(b, `,"columnDefinitions":`...), l.Columns...)
		return append(b, `,"rows":[`...)
	}
	return append(b, `,"items":[`...)
}

// tailJSON is what comes after the last item.
var tailJSON = []byte("]}\n")

// nullJSON ends a list without items that says null of them.
var nullJSON = []byte("null}\n")

var comma = []byte{','}

// Items are a list's, in pieces: each its head, its body and the tail. Protobuf has bodies only.
type Items struct {
	// Bodies are the items', or what their heads and the tail leave of them.
	Bodies [][]byte
	// Head comes before each in JSON, in place of its body's opening brace; nil for nothing.
	Head []byte
	// Heads, where there are any, are each item's own in place of Head. A body may be empty then.
	Heads [][]byte
	// Tail comes after each in JSON.
	Tail []byte
}

// Len is how many items there are.
func (i *Items) Len() int { return len(i.Bodies) }

// pieces are an item's.
func (i *Items) pieces(n int) (head, body, tail []byte) {
	head, body = i.Head, i.Bodies[n]
	if i.Heads != nil {
		head = i.Heads[n]
	}
	if head != nil && len(body) > 0 {
		body = body[1:]
	}
	return head, body, i.Tail
}

// Append appends to dst the item with number n, in JSON.
func (i *Items) Append(dst []byte, n int) []byte {
	head, body, tail := i.pieces(n)
	return append(append(append(dst, head...), body...), tail...)
}

// Body is a list's body: Head, the items, and Tail.
type Body struct {
	Head, Tail []byte
	// Size is the whole body's in bytes.
	Size int64

	// Items are those between the two.
	Items *Items

	protobuf bool
}

// Body is the list's body with its items, in JSON or protobuf.
func (l *List) Body(protobuf bool, items *Items) *Body {
	b := &Body{Items: items, protobuf: protobuf}
	n := 0
	for i := range items.Len() {
		n += b.ItemBytes(i)
	}
	switch {
	case protobuf:
		b.Head, b.Tail = l.headProtobuf(n), TailProtobuf
	case items.Len() == 0 && l.Kind == "PartialObjectMetadataList": // kube-apiserver says null of these
		head := l.headJSON()
		b.Head, b.Tail = head[:len(head)-1], nullJSON
	default:
		b.Head, b.Tail = l.headJSON(), tailJSON
	}
	b.Size = int64(len(b.Head) + n + len(b.Tail))
	return b
}

// ItemBytes is how many bytes the item with number i is in the body.
func (b *Body) ItemBytes(i int) int {
	if b.protobuf {
		return FieldLen(len(b.Items.Bodies[i]))
	}
	head, body, tail := b.Items.pieces(i)
	n := len(head) + len(body) + len(tail)
	if i < b.Items.Len()-1 {
		n++
	}
	return n
}

// Run appends to pieces the bytes of some items that follow each other, from first up to end, as they are in the body.
// Only the last item's depend on where it is.
func (b *Body) Run(pieces [][]byte, first, end int) [][]byte {
	for i := first; i < end; i++ {
		if b.protobuf {
			item := b.Items.Bodies[i]
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

// Send writes the body, and ends it.
func (b *Body) Send(w *Chunks) error {
	w.Begin(b.Size)
	err := w.Add(b.Head)
	var pieces [][]byte
	for i := 0; i < b.Items.Len() && err == nil; i++ {
		pieces = b.Run(pieces[:0], i, i+1)
		for _, p := range pieces {
			err = w.Add(p)
		}
	}
	if err != nil {
		return err
	}
	_ = w.Add(b.Tail)
	return w.End()
}

// itemHeadProtobuf is what comes before one item of n bytes in a list's protobuf.
func itemHeadProtobuf(n int) []byte { return tag(nil, 2, n) }

// headProtobuf is a list's body up to its first item; items is the length of all items with their heads.
func (l *List) headProtobuf(items int) []byte {
	var m []byte
	m = tag(m, 1, 0) // selfLink, always written
	rv := strconv.FormatInt(l.Revision, 10)
	m = append(tag(m, 2, len(rv)), rv...)
	m = append(tag(m, 3, len(l.Continue)), l.Continue...)
	if l.Remaining != nil {
		m = protowire.AppendVarint(protowire.AppendTag(m, 4, protowire.VarintType), uint64(*l.Remaining))
	}
	return envelopeHead(l.Kind, l.APIVersion, FieldLen(len(m))+items, func(b []byte) []byte {
		return append(tag(b, 1, len(m)), m...)
	})
}
