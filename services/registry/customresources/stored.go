package customresources

import (
	"context"
	"fmt"
	"log/slog"
	"path"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/crd"
	"watershed.dev/services/registry/storage"
)

// crdResource is the stored resource of CRDs.
const crdResource = "customresourcedefinitions.apiextensions.k8s.io"

// IsCRD reports whether st is the stored resource of CRDs.
func IsCRD(st *storage.Resource) bool { return st.Name() == crdResource }

// storageResourceOf returns the stored resource of a CRD's objects, for the publisher and the watch tier. Each object
// is decoded in its stored version, so that no webhook is called. The selectable fields are the fields that any version
// can select by. If versions differ in more than apiVersion, the fields have the values of the stored version.
func storageResourceOf(s *storage.Storage, d *crd.CRD) *storage.Resource {
	var selectable []apiextensionsv1.SelectableField
	seen := map[string]bool{}
	for _, v := range d.Spec.Versions {
		for _, f := range v.SelectableFields {
			if !seen[f.JSONPath] {
				seen[f.JSONPath] = true
				selectable = append(selectable, f)
			}
		}
	}
	kind := d.Kind(d.StorageVersion)
	strategy := customresource.NewStrategy(crdserverscheme.NewUnstructuredObjectTyper(), d.Namespaced(), kind, nil,
		nil, nil, nil, nil, selectable)
	return s.CustomResource(d.Resource("").GroupResource(), kind, d.Decode, strategy.GetAttrs,
		d.UsesWebhook() && len(selectable) > 0)
}

// CRDs finds the stored resources of custom resources as of a revision, for the publisher. The publisher applies every
// event of a CRD, in etcd's order. CRDs is not safe for concurrent use.
type CRDs struct {
	storage  *storage.Storage
	byName   map[string]crdAt
	byPrefix map[string]*storage.Resource
	// unreadable has the names of the CRDs that could not be decoded when they were last read, by the prefix of their
	// objects' keys.
	unreadable map[string]string
}

// crdAt is a CRD and the stored resource of its objects.
type crdAt struct {
	crd             *apiextensionsv1.CustomResourceDefinition
	storageResource *storage.Resource
}

// CRDsAt reads the CRDs that etcd has at a revision. A CRD that cannot be decoded is unreadable.
func CRDsAt(ctx context.Context, s *storage.Storage, etcd *storage.Etcd, revision int64) (*CRDs, error) {
	f := &CRDs{
		storage:    s,
		byName:     map[string]crdAt{},
		byPrefix:   map[string]*storage.Resource{},
		unreadable: map[string]string{},
	}
	crds, ok := s.ByName(crdResource)
	if !ok {
		return f, nil
	}
	err := etcd.ReadPages(ctx, crds.Prefix, revision, true, func(kvs []*mvccpb.KeyValue) error {
		if crds.Etcd != etcd { // the read shows only that the revision is not compacted
			return nil
		}
		for _, kv := range kvs {
			if err := f.read(ctx, crds, kv); err != nil {
				slog.Error("A CRD cannot be decoded; each event of its objects resets them", "key", string(kv.Key),
					"error", err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (f *CRDs) read(ctx context.Context, crds *storage.Resource, kv *mvccpb.KeyValue) error {
	d, err := decode(ctx, crds, string(kv.Key), kv.Value, kv.ModRevision)
	if err != nil {
		f.MarkUnreadable(path.Base(string(kv.Key)))
		return err
	}
	f.set(d)
	return nil
}

// MarkUnreadable records that a CRD could not be decoded at its last event. It returns the stored resource whose
// objects can no longer be decoded, or an empty name.
func (f *CRDs) MarkUnreadable(name string) string {
	before, known := f.byName[name]
	f.forget(name)
	f.unreadable[f.objectPrefix(name)] = name
	if !known {
		return ""
	}
	return before.storageResource.Name()
}

// UnreadableByKey returns the name of the unreadable CRD of an etcd key, and the rest of the key.
func (f *CRDs) UnreadableByKey(key, prefix string) (name, object string, ok bool) {
	objects, _ := prefixOfObjects(key, prefix)
	name, ok = f.unreadable[objects]
	return name, key[len(objects):], ok
}

// ReadAgain reads an unreadable CRD as of a revision. It reports whether the CRD exists, or may exist because etcd does
// not respond. If the CRD can be decoded now, it is no longer unreadable.
func (f *CRDs) ReadAgain(ctx context.Context, name string, revision int64) (exists bool, err error) {
	crds, _ := f.storage.ByName(crdResource)
	resp, err := crds.Etcd.Client.Client.Get(ctx, crds.Prefix+name, clientv3.WithRev(revision))
	if err != nil {
		return true, err
	}
	if len(resp.Kvs) == 0 {
		f.forget(name)
		return false, nil
	}
	return true, f.read(ctx, crds, resp.Kvs[0])
}

// objectPrefix returns the prefix of the keys of a CRD's objects.
func (f *CRDs) objectPrefix(name string) string {
	return f.storage.CustomResourceKey(schema.ParseGroupResource(name), "", "")
}

// ReadCRD reads a CRD from etcd. It returns nil if the CRD does not exist.
func ReadCRD(ctx context.Context, s *storage.Storage, name string) (*apiextensionsv1.CustomResourceDefinition, error) {
	crds, ok := s.ByName(crdResource)
	if !ok || name != path.Base(name) {
		return nil, nil
	}
	key := crds.Prefix + name
	resp, err := s.Client.Client.Get(ctx, key)
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return decode(ctx, crds, key, resp.Kvs[0].Value, resp.Kvs[0].ModRevision)
}

func decode(ctx context.Context, st *storage.Resource, key string, data []byte,
	revision int64) (*apiextensionsv1.CustomResourceDefinition, error) {
	obj, err := st.Decode(ctx, key, data, revision)
	if err != nil {
		return nil, err
	}
	return convertToV1(obj)
}

func convertToV1(obj runtime.Object) (*apiextensionsv1.CustomResourceDefinition, error) {
	internal, ok := obj.(*apiextensions.CustomResourceDefinition)
	if !ok {
		return nil, fmt.Errorf("not a CustomResourceDefinition: %T", obj)
	}
	d := &apiextensionsv1.CustomResourceDefinition{}
	if err := apiextensionsapiserver.Scheme.Convert(internal, d, nil); err != nil {
		return nil, err
	}
	crd.Share(d)
	return d, nil
}

// ByKey returns the stored resource of an etcd key. prefix is the prefix of all keys.
func (f *CRDs) ByKey(key, prefix string) (*storage.Resource, bool) {
	if len(f.byPrefix) == 0 {
		return nil, false
	}
	objects, ok := prefixOfObjects(key, prefix)
	if !ok {
		return nil, false
	}
	st, ok := f.byPrefix[objects]
	return st, ok
}

// prefixOfObjects returns the part /registry/group/resource/ of a key. prefix is /registry/.
func prefixOfObjects(key, prefix string) (string, bool) {
	if len(key) <= len(prefix) {
		return "", false
	}
	end := len(prefix)
	for range 2 {
		for end < len(key) && key[end] != '/' {
			end++
		}
		if end == len(key) {
			return "", false
		}
		end++
	}
	return key[:end], true
}

// Apply applies an event of obj, a CRD. It returns the stored resource whose objects are decoded differently from now
// on, or an empty name.
func (f *CRDs) Apply(obj runtime.Object, deleted bool) string {
	d, err := convertToV1(obj)
	if err != nil {
		return ""
	}
	before, known := f.byName[d.Name]
	switch {
	case deleted:
		f.forget(d.Name)
	case known && crd.Same(before.crd, d):
		return ""
	default:
		f.set(d)
	}
	if !known {
		return ""
	}
	return before.storageResource.Name()
}

func (f *CRDs) forget(name string) {
	if old, known := f.byName[name]; known {
		delete(f.byPrefix, old.storageResource.Prefix)
	}
	delete(f.byName, name)
	delete(f.unreadable, f.objectPrefix(name))
}

func (f *CRDs) set(d *apiextensionsv1.CustomResourceDefinition) {
	f.forget(d.Name)
	if _, ok := f.storage.ByName(d.Name); ok {
		return // a CRD with the name of a built-in resource has no objects, and its changes affect no built-in object
	}
	crdInfo, err := crd.New(d)
	if err != nil {
		return // no accepted names, or another plural
	}
	st := storageResourceOf(f.storage, crdInfo)
	f.byName[d.Name], f.byPrefix[st.Prefix] = crdAt{d, st}, st
}
