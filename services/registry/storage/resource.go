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

// Resource is one resource as etcd has it.
type Resource struct {
	GroupResource schema.GroupResource
	// Prefix is the key prefix, with the slash that ends it.
	Prefix string
	// Kind is the kind and version that the log carries, which is the one stored.
	Kind schema.GroupVersionKind

	codec       runtime.Decoder
	newFunc     func() runtime.Object
	attrs       apistorage.AttrFunc
	transformer value.Transformer
	versioner   apistorage.Versioner
	convertor   runtime.ObjectConvertor
	// decorator is what the resource's own storage does to every object that it has read, or nil.
	decorator func(runtime.Object)
	// alwaysChanged: what selectors ask of an object is not all that attrs tells.
	alwaysChanged bool
	// encrypted: an object of it was seen encrypted in etcd. It stays so until the process ends.
	encrypted atomic.Bool
}

// Name is the resource's name across the system.
func (s *Resource) Name() string { return s.GroupResource.String() }

// CustomResource is the stored resource of a definition: whoever follows definitions keeps it. kind is in the version that is
// stored now; decode reads an object in the version that it is stored in, and attrs tells what selectors ask of it in
// that version. converted: they may ask more, of other versions.
func (s *Storage) CustomResource(gr schema.GroupResource, kind schema.GroupVersionKind,
	decode func([]byte) (*unstructured.Unstructured, error), attrs apistorage.AttrFunc, converted bool) *Resource {
	return &Resource{
		alwaysChanged: converted,
		GroupResource: gr,
		Prefix:        s.prefix + gr.Group + "/" + gr.Resource + "/",
		Kind:          kind,
		codec:         decoder(decode),
		attrs:         attrs,
		newFunc:       func() runtime.Object { return &unstructured.Unstructured{} },
		transformer:   s.encryption.transformerFor(gr),
		versioner:     apistorage.APIObjectVersioner{},
	}
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
	// The log carries the most preferred version of the group where that has the kind: clients mostly read that one.
	for _, gv := range scheme.PrioritizedVersionsForGroup(gvk.Group) {
		if scheme.Recognizes(gv.WithKind(gvk.Kind)) {
			gvk = gv.WithKind(gvk.Kind)
			break
		}
	}
	s.Kind, s.convertor = gvk, scheme
	return nil
}

var schemes = []*runtime.Scheme{legacyscheme.Scheme}

// AddScheme makes the types of another scheme storable.
func AddScheme(s *runtime.Scheme) { schemes = append(schemes, s) }

// SchemeFor is the scheme that knows obj's type.
func SchemeFor(obj runtime.Object) *runtime.Scheme {
	for _, s := range schemes {
		if _, _, err := s.ObjectKinds(obj); err == nil {
			return s
		}
	}
	return legacyscheme.Scheme
}

type authenticatedKey string

// AuthenticatedData implements value.Context: an encrypted value belongs to its key.
func (k authenticatedKey) AuthenticatedData() []byte { return []byte(k) }

// Decode reads an etcd value.
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

// SetDecorator has f change every object that is read.
func (s *Resource) SetDecorator(f func(runtime.Object)) { s.decorator = f }

// Encode makes what the log carries of obj.
func (s *Resource) Encode(obj runtime.Object) (*logv1.Object, error) {
	l, f, err := s.attrs(obj)
	if err != nil {
		return nil, err
	}
	out := &logv1.Object{Labels: l, Fields: f}
	versioned := obj
	if s.convertor != nil {
		if versioned, err = s.convertor.ConvertToVersion(obj, s.Kind.GroupVersion()); err != nil {
			return nil, err
		}
		// lists hold items without it, frames put it back
		versioned.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	if u, ok := versioned.(*unstructured.Unstructured); ok {
		return out, encodeUnstructured(u, out)
	}
	if out.Json, err = json.Marshal(versioned); err != nil {
		return nil, err
	}
	if m, ok := versioned.(interface{ Marshal() ([]byte, error) }); ok {
		if out.Protobuf, err = m.Marshal(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// encodeUnstructured writes an object without a Go type as the log carries it: metadata first, where what cuts it out
// looks for it, and in protobuf once more, for those who watch nothing else.
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

// UnstructuredJSON is an object's JSON without apiVersion and kind, metadata first.
func UnstructuredJSON(u *unstructured.Unstructured) ([]byte, error) {
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

// Row decodes an etcd value and encodes it for the watch tier. What cannot be read is a row that says why.
func (s *Resource) Row(ctx context.Context, key string, data []byte, revision int64) *registryv1.Row {
	row := &registryv1.Row{Revision: revision}
	obj, o, err := s.Transcode(ctx, key, data, revision)
	if err != nil {
		row.Namespace, row.Name = s.splitKey(key)
		row.Unreadable = err.Error()
		return row
	}
	row.Namespace, row.Name = obj.GetNamespace(), obj.GetName()
	row.Labels, row.Fields, row.Json, row.Protobuf, row.Version = o.Labels, o.Fields, o.Json, o.Protobuf, o.Version
	return row
}

// Transcode decodes an etcd value and encodes it. A panic of a type's own code, which a value of an unknown making may
// reach, is an error like any other.
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

// noteEncryption is told of a value that was read.
func (s *Resource) noteEncryption(value []byte) {
	if Encrypted(value) {
		s.encrypted.Store(true)
	}
}

// Key is an object's in etcd.
func (s *Resource) Key(namespace, name string) string {
	if namespace == "" {
		return s.Prefix + name
	}
	return s.Prefix + namespace + "/" + name
}

// splitKey is the namespace and name that an etcd key stands for, where the object itself cannot say.
func (s *Resource) splitKey(key string) (namespace, name string) {
	rest := strings.TrimPrefix(key, s.Prefix)
	if i := strings.LastIndexByte(rest, '/'); i >= 0 {
		return rest[:i], rest[i+1:]
	}
	return "", rest
}

// SelectableFields are the stored fields that the resource's objects have.
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

// DecodeVersioned reads what the log carries back into the hub version.
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

// SelectionChanged says whether a selector could tell old from the newer object.
func (s *Resource) SelectionChanged(old runtime.Object, newer *logv1.Object) (bool, error) {
	if s.alwaysChanged {
		return true, nil
	}
	l, f, err := s.attrs(old)
	return err == nil && (!maps.Equal(l, newer.Labels) || !maps.Equal(f, newer.Fields)), err
}

// Revision is an object's resource version as a number.
func Revision(obj metav1.Object) (uint64, error) {
	return apistorage.APIObjectVersioner{}.ParseResourceVersion(obj.GetResourceVersion())
}
