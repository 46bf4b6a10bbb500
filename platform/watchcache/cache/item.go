package cache

import (
	"bytes"
	"hash/fnv"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/fields"

	"watershed.dev/platform/frame"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Item is one object. It does not change, except that its encodings may be packed.
type Item struct {
	// Key is "namespace/name", or "name" for cluster-scoped objects: the order of etcd's keys.
	Key             string
	Namespace, Name string
	Revision        int64
	Labels          map[string]string
	// fields are the selectable fields; nil if metadata.name and metadata.namespace are all, as for most kinds.
	fields map[string]string
	// Version is the API version of the JSON. Only custom resources have it, because etcd holds each of their objects
	// in the version that it was written in.
	Version string

	// Serial identifies the item among all items of the process.
	Serial uint64

	json, protobuf atomic.Pointer[encoding]
	// selectorBytes is the memory of Labels and fields.
	selectorBytes int32
	// metadataEnd is the offset in the JSON at which the metadata ends; 0 until MetadataEnd computes it.
	metadataEnd atomic.Int32
	// uidHash is the hash of metadata.uid; 0 until UIDHash computes it.
	uidHash atomic.Uint64
}

// Selectable fields of every kind.
const (
	nameField      = "metadata.name"
	namespaceField = "metadata.namespace"
)

// Field returns a selectable field; empty if the object lacks it.
func (i *Item) Field(name string) string {
	switch name {
	case nameField:
		return i.Name
	case namespaceField:
		return i.Namespace
	}
	return i.fields[name]
}

// Fields returns the selectable fields.
func (i *Item) Fields() fields.Fields { return (*selectable)(i) }

// selectable implements fields.Fields.
type selectable Item

func (s *selectable) Get(name string) string { return (*Item)(s).Field(name) }

func (s *selectable) Has(name string) bool {
	_, has := s.fields[name]
	return has || name == nameField || name == namespaceField && s.Namespace != ""
}

// JSON returns the object as JSON without apiVersion and kind.
func (i *Item) JSON() []byte { return i.json.Load().bytes() }

// Protobuf returns the object's protobuf without an envelope; empty for a custom resource.
func (i *Item) Protobuf() []byte { return i.protobuf.Load().bytes() }

// JSONSize returns the size of JSON in bytes.
func (i *Item) JSONSize() int { return i.json.Load().len() }

// ProtobufSize returns the size of Protobuf in bytes.
func (i *Item) ProtobufSize() int { return i.protobuf.Load().len() }

// Packed reports whether the object's JSON or protobuf is packed. A part of its bytes then keeps all bytes of the pack
// in memory.
func (i *Item) Packed() bool {
	for _, e := range []*encoding{i.json.Load(), i.protobuf.Load()} {
		if e != nil && e.pack != nil {
			return true
		}
	}
	return false
}

// UIDHash returns ShardHash of metadata.uid. It computes the hash only once.
func (i *Item) UIDHash() uint64 {
	hash := i.uidHash.Load()
	if hash == 0 {
		hash = ShardHash(frame.UID(i.JSON()))
		i.uidHash.Store(hash)
	}
	return hash
}

// ShardHash returns the hash by which a shard selector selects: FNV-1a with 64 bits (k8s.io/apimachinery/pkg/sharding).
func ShardHash(value string) uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(value))
	return hash.Sum64()
}

// MetadataEnd returns the offset in JSON at which the metadata ends. It finds the end only once.
func (i *Item) MetadataEnd() (int, error) {
	if end := i.metadataEnd.Load(); end > 0 {
		return int(end), nil
	}
	through, err := frame.ThroughMetadata(i.JSON())
	if err != nil {
		return 0, err
	}
	i.metadataEnd.Store(int32(len(through)))
	return len(through), nil
}

// ThroughMetadata returns frame.ThroughMetadata of JSON. It copies the bytes of a packed object.
func (i *Item) ThroughMetadata() ([]byte, error) {
	end, err := i.MetadataEnd()
	if err != nil {
		return nil, err
	}
	e := i.json.Load()
	through := e.bytes()[:end:end]
	if e.pack != nil {
		return bytes.Clone(through), nil
	}
	return through, nil
}

// lastSerial is the serial of the newest item.
var lastSerial atomic.Uint64

// Size returns the item's memory in bytes, approximately, while its encodings are not packed.
func (i *Item) Size() int {
	return i.JSONSize() + i.ProtobufSize() + len(i.Key) + 200 + int(i.selectorBytes)
}

// mapBytes is about the memory of a map of up to eight pairs beside the bytes of their strings, and pairBytes that of
// each further pair.
const (
	mapBytes  = 336
	pairBytes = 37
)

func sizeOf(pairs map[string]string) (n int) {
	if len(pairs) > 0 {
		n = mapBytes + max(0, len(pairs)-8)*pairBytes
	}
	for k, v := range pairs {
		n += len(k) + len(v)
	}
	return n
}

func itemOf(namespace, name string, revision int64, o *logv1.Object) *Item {
	i := newItem(namespace, name, revision, o.Labels, o.Fields)
	i.Version = o.Version
	i.setEncodings(o.Json, o.Protobuf, o.Encoder)
	return i
}

// newItem returns an item without encodings. The item shares the maps with other caches of the process, so nothing may
// change them.
func newItem(namespace, name string, revision int64, labels, selectable map[string]string) *Item {
	if onlyNames(selectable) {
		selectable = nil
	}
	key := Key(namespace, name)
	return &Item{
		Key:           key,
		Namespace:     key[:len(namespace)], // shares the memory of key
		Name:          key[len(key)-len(name):],
		Revision:      revision,
		Labels:        labels,
		fields:        selectable,
		Serial:        lastSerial.Add(1),
		selectorBytes: int32(sizeOf(labels) + sizeOf(selectable)),
	}
}

// onlyNames reports whether the item itself has all selectable fields.
func onlyNames(selectable map[string]string) bool {
	for name := range selectable {
		if name != nameField && name != namespaceField {
			return false
		}
	}
	return true
}

func (i *Item) setEncodings(json, protobuf []byte, encoder uint32) {
	i.json.Store(ownEncoding(json, encoder))
	if len(protobuf) > 0 {
		i.protobuf.Store(ownEncoding(protobuf, encoder))
	}
}

// Key returns an object's key, in the order of etcd's keys.
func Key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// ItemOf returns an object as registry read it from etcd.
func ItemOf(row *registryv1.Row) *Item {
	i := newItem(row.Namespace, row.Name, row.Revision, row.Labels, row.Fields)
	i.Version = row.Version
	i.setEncodings(row.Json, row.Protobuf, row.Encoder)
	return i
}
