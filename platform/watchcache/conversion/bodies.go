package conversion

import (
	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
)

// The bodies of a list are read from the items when they are sent, because the items may be packed. A list from cached
// compressed runs reads none.
type (
	jsonBodies     []*cache.Item
	protobufBodies []*cache.Item
	// metadataBodies are the JSON up to the end of the metadata. All ends are known.
	metadataBodies []*cache.Item
	// noBodies is a number of empty bodies.
	noBodies int
)

func (b noBodies) Len() int       { return int(b) }
func (noBodies) Size(int) int     { return 0 }
func (noBodies) Bytes(int) []byte { return nil }

func (b jsonBodies) Len() int           { return len(b) }
func (b jsonBodies) Size(n int) int     { return b[n].JSONSize() }
func (b jsonBodies) Bytes(n int) []byte { return b[n].JSON() }

func (b protobufBodies) Len() int           { return len(b) }
func (b protobufBodies) Size(n int) int     { return b[n].ProtobufSize() }
func (b protobufBodies) Bytes(n int) []byte { return b[n].Protobuf() }

func (b metadataBodies) Len() int { return len(b) }

func (b metadataBodies) Size(n int) int {
	end, _ := b[n].MetadataEnd() // metadataOf has returned the error
	return end
}

func (b metadataBodies) Bytes(n int) []byte { return b[n].JSON()[:b.Size(n)] }

// bodiesOf returns the items' own bytes in q's encoding.
func bodiesOf(q *query.Query, items []*cache.Item) (frame.Bodies, error) {
	switch {
	case q.Encoding.Partial && !q.Encoding.Protobuf:
		return metadataOf(q, items)
	case !q.Encoding.Protobuf:
		return jsonBodies(items), nil
	case !q.Encoding.Partial:
		return protobufBodies(items), nil
	}
	var err error
	bodies := make(frame.Slices, len(items))
	for i, item := range items {
		if bodies[i], err = q.Encoding.Item(item.Protobuf()); err != nil {
			return nil, err
		}
	}
	return bodies, nil
}

// metadataOf returns the items' JSON up to the end of their metadata.
func metadataOf(q *query.Query, items []*cache.Item) (frame.Bodies, error) {
	var err error
	if q.Encoding.OmitAnnotation == "" {
		for _, i := range items {
			if _, err = i.MetadataEnd(); err != nil {
				return nil, err
			}
		}
		return metadataBodies(items), nil
	}
	bodies := make(frame.Slices, len(items))
	for n, i := range items {
		if bodies[n], err = q.ThroughMetadata(i); err != nil {
			return nil, err
		}
	}
	return bodies, nil
}
