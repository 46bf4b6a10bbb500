package conversion

import (
	"bytes"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
)

// stored are the items of a list. Their bodies are read when they are sent, because the items may be packed.
type stored []*cache.Item

// Len implements frame.Bodies.
func (s stored) Len() int { return len(s) }

// The bodies that need no bytes of their items before they are sent.
type (
	jsonBodies     struct{ stored }
	protobufBodies struct{ stored }
	// metadataBodies are the JSON up to the end of the metadata. All ends are known.
	metadataBodies struct{ stored }
)

func (b jsonBodies) Size(n int) int     { return b.stored[n].JSONSize() }
func (b jsonBodies) Bytes(n int) []byte { return b.stored[n].JSON() }

func (b protobufBodies) Size(n int) int     { return b.stored[n].ProtobufSize() }
func (b protobufBodies) Bytes(n int) []byte { return b.stored[n].Protobuf() }

func (b metadataBodies) Size(n int) int {
	end, _ := b.stored[n].MetadataEnd() // metadataOf has returned the error
	return end
}

func (b metadataBodies) Bytes(n int) []byte {
	through, _ := b.stored[n].ThroughMetadata() // as Size
	return through
}

// bodiesOf returns the items' own bytes in q's encoding.
func bodiesOf(q *query.Query, items []*cache.Item) (frame.Bodies, error) {
	switch {
	case q.Encoding.Partial && !q.Encoding.Protobuf:
		return metadataOf(q, items)
	case !q.Encoding.Protobuf:
		return jsonBodies{items}, nil
	case !q.Encoding.Partial:
		return protobufBodies{items}, nil
	}
	return readAll(items, func(i *cache.Item) ([]byte, error) {
		metadata, err := q.Encoding.Item(i.Protobuf())
		if i.Packed() {
			metadata = bytes.Clone(metadata)
		}
		return metadata, err
	})
}

// metadataOf returns the items' JSON up to the end of their metadata.
func metadataOf(q *query.Query, items []*cache.Item) (frame.Bodies, error) {
	if q.Encoding.OmitAnnotation != "" {
		return readAll(items, q.ThroughMetadata)
	}
	for _, i := range items {
		if _, err := i.MetadataEnd(); err != nil {
			return nil, err
		}
	}
	return metadataBodies{items}, nil
}

// readAll returns the bodies that read returns.
func readAll(items []*cache.Item, read func(*cache.Item) ([]byte, error)) (frame.Bodies, error) {
	var err error
	bodies := make(frame.Slices, len(items))
	for n, i := range items {
		if bodies[n], err = read(i); err != nil {
			return nil, err
		}
	}
	return bodies, nil
}
