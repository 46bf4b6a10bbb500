package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Resource is a resource as etcd stores it: its key prefix, stored version and codec.
type Resource struct {
	// Etcd is the etcd that stores the resource.
	Etcd          *Etcd
	GroupResource schema.GroupResource
	// Prefix is the etcd key prefix, with a trailing slash.
	Prefix string
	// Kind is the kind and version that the log carries.
	Kind schema.GroupVersionKind

	codec       runtime.Decoder
	newFunc     func() runtime.Object
	attrs       apistorage.AttrFunc
	transformer value.Transformer
	versioner   apistorage.Versioner
	convertor   runtime.ObjectConvertor
	// decorator is the Decorator of the resource's store, which changes every object that was read, or nil.
	decorator func(runtime.Object)
	// encoder identifies how this registry encodes the resource (encoderOf).
	encoder uint32
	// alwaysChanged: selectors may use fields that attrs does not return.
	alwaysChanged bool
	// encrypted: etcd returned an encrypted object. It stays true until the process ends.
	encrypted atomic.Bool
}

// Name returns the resource's name in all services, such as "deployments.apps".
func (s *Resource) Name() string { return s.GroupResource.String() }

// CustomResource returns the stored resource of a CRD. The caller caches it. kind has the current storage version.
// decode reads an object in the version that it is stored in. attrs returns its selectable fields in that version.
// converted: selectors may use fields of other versions.
func (s *Storage) CustomResource(gr schema.GroupResource, kind schema.GroupVersionKind,
	decode func([]byte) (*unstructured.Unstructured, error), attrs apistorage.AttrFunc, converted bool) *Resource {
	return &Resource{
		alwaysChanged: converted,
		Etcd:          s.Etcd,
		GroupResource: gr,
		Prefix:        s.customResourcePrefix(gr),
		Kind:          kind,
		encoder:       encoderOf(kind),
		codec:         decoder(decode),
		attrs:         attrs,
		newFunc:       func() runtime.Object { return &unstructured.Unstructured{} },
		transformer:   s.encryption.transformerFor(gr),
		versioner:     apistorage.APIObjectVersioner{},
	}
}

// customResourcePrefix returns the prefix of the etcd keys of a custom resource.
func (s *Storage) customResourcePrefix(gr schema.GroupResource) string {
	return s.prefix + gr.Group + "/" + gr.Resource + "/"
}

// CustomResourceKey returns the etcd key of a custom resource's object. namespace is empty for a cluster-scoped object.
func (s *Storage) CustomResourceKey(gr schema.GroupResource, namespace, name string) string {
	st := Resource{Prefix: s.customResourcePrefix(gr)}
	return st.Key(namespace, name)
}

type decoder func([]byte) (*unstructured.Unstructured, error)

// Decode implements runtime.Decoder.
func (d decoder) Decode(data []byte, _ *schema.GroupVersionKind, _ runtime.Object) (runtime.Object,
	*schema.GroupVersionKind, error) {
	u, err := d(data)
	if err != nil {
		return nil, nil, err
	}
	gvk := u.GroupVersionKind()
	return u, &gvk, nil
}

func (s *Resource) complete(config *storagebackend.ConfigForResource, example runtime.Object) error {
	scheme := SchemeFor(example)
	kinds, _, err := scheme.ObjectKinds(example)
	if err != nil {
		return err
	}
	gvk, ok := config.EncodeVersioner.KindForGroupVersionKinds(kinds)
	if !ok {
		return fmt.Errorf("no stored version for %s", s.GroupResource)
	}
	// The log carries the preferred version of the group if it has the kind, because most clients read that version.
	for _, gv := range scheme.PrioritizedVersionsForGroup(gvk.Group) {
		if scheme.Recognizes(gv.WithKind(gvk.Kind)) {
			gvk = gv.WithKind(gvk.Kind)
			break
		}
	}
	s.Kind, s.convertor, s.encoder = gvk, runtime.UnsafeObjectConvertor(scheme), encoderOf(gvk)
	return nil
}

var schemes = []*runtime.Scheme{legacyscheme.Scheme}

// AddScheme registers a scheme whose types can be stored. It is not safe for concurrent use.
func AddScheme(s *runtime.Scheme) { schemes = append(schemes, s) }

// SchemeFor returns the scheme that recognizes the type of obj, or the legacy scheme.
func SchemeFor(obj runtime.Object) *runtime.Scheme {
	for _, s := range schemes {
		if _, _, err := s.ObjectKinds(obj); err == nil {
			return s
		}
	}
	return legacyscheme.Scheme
}

type authenticatedKey string

// AuthenticatedData implements value.Context: an encrypted value is bound to its key.
func (k authenticatedKey) AuthenticatedData() []byte { return []byte(k) }

// Decode decrypts and decodes an etcd value.
func (s *Resource) Decode(ctx context.Context, key string, data []byte, revision int64) (runtime.Object, error) {
	plain, _, err := s.transformer.TransformFromStorage(ctx, data, authenticatedKey(key))
	if err != nil {
		return nil, err
	}
	obj, _, err := s.codec.Decode(plain, nil, s.newFunc())
	if err != nil {
		return nil, err
	}
	if s.decorator != nil {
		s.decorator(obj)
	}
	return obj, s.versioner.UpdateObject(obj, uint64(revision))
}

// SetDecorator makes Decode call f with every object.
func (s *Resource) SetDecorator(f func(runtime.Object)) { s.decorator = f }

// Encode returns obj as the log carries it. It may change obj, because the conversion shares its memory.
func (s *Resource) Encode(obj runtime.Object) (*logv1.Object, error) {
	l, f, err := s.attrs(obj)
	if err != nil {
		return nil, err
	}
	out := &logv1.Object{Labels: l, Fields: f, Encoder: s.encoder}
	versioned := obj
	if s.convertor != nil {
		if versioned, err = s.convertor.ConvertToVersion(obj, s.Kind.GroupVersion()); err != nil {
			return nil, err
		}
		// list items have no apiVersion and kind, watch events get them from platform/frame
		versioned.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	if u, ok := versioned.(*unstructured.Unstructured); ok {
		return out, encodeUnstructured(u, out)
	}
	if out.Json, err = marshalJSON(versioned); err != nil {
		return nil, err
	}
	if m, ok := versioned.(interface{ Marshal() ([]byte, error) }); ok {
		if out.Protobuf, err = m.Marshal(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// encodeUnstructured encodes an object without a Go type. Its JSON begins with metadata, so that readers find metadata
// without a full parse. Its protobuf holds only metadata, for watches of PartialObjectMetadata.
func encodeUnstructured(u *unstructured.Unstructured, out *logv1.Object) error {
	out.Version = u.GroupVersionKind().Version
	var err error
	if out.Json, err = UnstructuredJSON(u); err != nil {
		return err
	}
	var partial metav1.PartialObjectMetadata
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(map[string]any{"metadata": u.Object["metadata"]},
		&partial); err != nil {
		return err
	}
	out.Protobuf, err = partial.Marshal()
	return err
}

// maxJSONBytes bounds the JSON of an object without a Go type. Defaults of its definition may multiply the bytes of a
// stored object, up to a terabyte. The bound fits an object of 3 MB whose every byte is escaped, and an event has two
// objects (platform/eventlog).
const maxJSONBytes = 28 << 20

// UnstructuredJSON returns an object's JSON without apiVersion and kind, metadata first. It returns an error if the
// JSON exceeds maxJSONBytes, before it encodes the object.
func UnstructuredJSON(u *unstructured.Unstructured) ([]byte, error) {
	if leastJSONBytes(u.Object, maxJSONBytes) > maxJSONBytes {
		return nil, fmt.Errorf("with the defaults of its definition, the object exceeds %d MB", maxJSONBytes>>20)
	}
	m, err := json.Marshal(u.Object["metadata"])
	if err != nil {
		return nil, err
	}
	rest := maps.Clone(u.Object)
	delete(rest, "metadata")
	delete(rest, "apiVersion")
	delete(rest, "kind")
	body, err := json.Marshal(rest)
	if err != nil {
		return nil, err
	}
	data := append(append(make([]byte, 0, len(m)+len(body)+16), `{"metadata":`...), m...)
	if len(rest) > 0 {
		data = append(data, ',')
	}
	return append(data, body[1:]...), nil
}

// leastJSONBytes returns nearly the size of a value's JSON, without numbers and commas. It ends above limit.
func leastJSONBytes(value any, limit int) int {
	bytes := len(`""`)
	switch v := value.(type) {
	case string:
		bytes += len(v)
		for i := range len(v) {
			switch c := v[i]; {
			case c < ' ', c == '<', c == '>', c == '&': // \u003c
				bytes += 5
			case c == '"', c == '\\':
				bytes++
			}
		}
	case map[string]any:
		for key, of := range v {
			if bytes += len(key) + len(`"":`) + leastJSONBytes(of, limit-bytes); bytes > limit {
				break
			}
		}
	case []any:
		for _, of := range v {
			if bytes += leastJSONBytes(of, limit-bytes); bytes > limit {
				break
			}
		}
	default:
		bytes = 1
	}
	return bytes
}

// Row decodes an etcd value and encodes it for the watch tier. If the value cannot be decoded, the row holds the error.
func (s *Resource) Row(ctx context.Context, key string, data []byte, revision int64) *registryv1.Row {
	row := &registryv1.Row{Revision: revision}
	obj, o, err := s.Transcode(ctx, key, data, revision)
	if err != nil {
		row.Namespace, row.Name = s.SplitKey(key)
		row.Unreadable = err.Error()
		return row
	}
	row.Namespace, row.Name = obj.GetNamespace(), obj.GetName()
	row.Labels, row.Fields, row.Json, row.Protobuf, row.Version = o.Labels, o.Fields, o.Json, o.Protobuf, o.Version
	row.Encoder = o.Encoder
	return row
}

// Transcode decodes an etcd value and encodes it. It returns a panic of a type's code as an error, because any value
// may be in etcd.
func (s *Resource) Transcode(ctx context.Context, key string, data []byte,
	revision int64) (m metav1.Object, o *logv1.Object, err error) {
	defer recovery.ToError("reading an object", &err)
	obj, err := s.Decode(ctx, key, data, revision)
	if err != nil {
		return nil, nil, err
	}
	if o, err = s.Encode(obj); err != nil {
		return nil, nil, err
	}
	m, err = meta.Accessor(obj)
	return m, o, err
}

// noteEncryption records whether a value that was read is encrypted.
func (s *Resource) noteEncryption(value []byte) {
	if Encrypted(value) {
		s.encrypted.Store(true)
	}
}

// Key returns an object's etcd key.
func (s *Resource) Key(namespace, name string) string {
	if namespace == "" {
		return s.Prefix + name
	}
	return s.Prefix + namespace + "/" + name
}

// SplitKey returns the namespace and name in an etcd key, for rows without a decoded object.
func (s *Resource) SplitKey(key string) (namespace, name string) {
	rest := strings.TrimPrefix(key, s.Prefix)
	if i := strings.LastIndexByte(rest, '/'); i >= 0 {
		return rest[:i], rest[i+1:]
	}
	return "", rest
}

// SelectableFields returns the names of the stored fields that selectors may use, sorted.
func (s *Resource) SelectableFields() []string {
	_, f, err := s.attrs(s.newFunc())
	if err != nil {
		return nil
	}
	var names []string
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// DecodeVersioned decodes an object of the log into a new object of its kind, which the caller supplies.
func (s *Resource) DecodeVersioned(o *logv1.Object,
	into func(schema.GroupVersionKind) (runtime.Object, error)) (runtime.Object, error) {
	obj, err := into(s.Kind)
	if err != nil {
		return nil, err
	}
	if u, ok := obj.(interface{ Unmarshal([]byte) error }); ok && len(o.Protobuf) > 0 {
		return obj, u.Unmarshal(o.Protobuf)
	}
	return obj, json.Unmarshal(o.Json, obj)
}

// SelectsStored reports whether selectors use only the labels and fields that Encode returns.
func (s *Resource) SelectsStored() bool { return !s.alwaysChanged }

// SelectionChanged reports whether some selector selects only one of the old and the newer object.
func (s *Resource) SelectionChanged(old runtime.Object, newer *logv1.Object) (bool, error) {
	if s.alwaysChanged {
		return true, nil
	}
	l, f, err := s.attrs(old)
	return err == nil && (!maps.Equal(l, newer.Labels) || !maps.Equal(f, newer.Fields)), err
}

// Revision returns an object's resourceVersion as a number.
func Revision(obj metav1.Object) (uint64, error) {
	return apistorage.APIObjectVersioner{}.ParseResourceVersion(obj.GetResourceVersion())
}
