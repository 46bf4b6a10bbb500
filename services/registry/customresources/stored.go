package customresources

import (
	"context"
	"fmt"
	"path"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/platform/crd"
	"watershed.dev/services/registry/storage"
)

// definitionsName is the stored resource of the definitions themselves.
const definitionsName = "customresourcedefinitions.apiextensions.k8s.io"

// Defines says whether a stored resource is that of the definitions.
func Defines(st *storage.Stored) bool { return st.Name() == definitionsName }

// StoredOf is how the publisher and the watch tier read a definition's objects: each in the version that it is stored
// in, so that no webhook has to be asked. Their fields are those that any version may select by; where another version
// of an object is more than its apiVersion, they are what they are in the version stored.
func StoredOf(s *storage.Storage, d *crd.CRD) *storage.Stored {
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
	return s.Custom(d.Resource("").GroupResource(), kind, d.Decode, strategy.GetAttrs,
		d.UsesWebhook() && len(selectable) > 0)
}

// Definitions knows, for the publisher, how to read custom resources as of each definition's change: it is told of
// every change in etcd's order.
type Definitions struct {
	storage  *storage.Storage
	byName   map[string]definitionAt
	byPrefix map[string]*storage.Stored
}

// definitionAt is a definition and how its objects are read.
type definitionAt struct {
	definition *apiextensionsv1.CustomResourceDefinition
	stored     *storage.Stored
}

// DefinitionsAt reads the definitions as they were at a revision.
func DefinitionsAt(ctx context.Context, s *storage.Storage, revision int64) (*Definitions, error) {
	f := &Definitions{storage: s, byName: map[string]definitionAt{}, byPrefix: map[string]*storage.Stored{}}
	definitions, ok := s.ByName(definitionsName)
	if !ok {
		return f, nil
	}
	resp, err := s.Client.Client.Get(ctx, definitions.Prefix, clientv3.WithPrefix(), clientv3.WithRev(revision))
	if err != nil {
		return nil, err
	}
	for _, kv := range resp.Kvs {
		if d, err := decode(ctx, definitions, string(kv.Key), kv.Value, kv.ModRevision); err == nil {
			f.set(d)
		}
	}
	return f, nil
}

// Read is a definition as etcd has it; nil where there is none.
func Read(ctx context.Context, s *storage.Storage, name string) (*apiextensionsv1.CustomResourceDefinition, error) {
	definitions, ok := s.ByName(definitionsName)
	if !ok || name != path.Base(name) {
		return nil, nil
	}
	key := definitions.Prefix + name
	resp, err := s.Client.Client.Get(ctx, key)
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return decode(ctx, definitions, key, resp.Kvs[0].Value, resp.Kvs[0].ModRevision)
}

func decode(ctx context.Context, st *storage.Stored, key string, data []byte,
	revision int64) (*apiextensionsv1.CustomResourceDefinition, error) {
	obj, err := st.Decode(ctx, key, data, revision)
	if err != nil {
		return nil, err
	}
	return versioned(obj)
}

func versioned(obj runtime.Object) (*apiextensionsv1.CustomResourceDefinition, error) {
	internal, ok := obj.(*apiextensions.CustomResourceDefinition)
	if !ok {
		return nil, fmt.Errorf("not a CustomResourceDefinition: %T", obj)
	}
	d := &apiextensionsv1.CustomResourceDefinition{}
	return d, apiextensionsapiserver.Scheme.Convert(internal, d, nil)
}

// ByKey finds whose etcd key it is.
func (f *Definitions) ByKey(key, prefix string) (*storage.Stored, bool) {
	if len(f.byPrefix) == 0 || len(key) <= len(prefix) {
		return nil, false
	}
	end := len(prefix) // /registry/group/resource/
	for range 2 {
		for end < len(key) && key[end] != '/' {
			end++
		}
		if end == len(key) {
			return nil, false
		}
		end++
	}
	st, ok := f.byPrefix[key[:end]]
	return st, ok
}

// Changed tells of an event of obj, a definition: gone says that it was deleted. The answer is the stored resource
// whose objects are read in another way from now on, or empty.
func (f *Definitions) Changed(obj runtime.Object, gone bool) string {
	d, err := versioned(obj)
	if err != nil {
		return ""
	}
	before, known := f.byName[d.Name]
	switch {
	case gone:
		f.forget(d.Name)
	case known && crd.Same(before.definition, d):
		return ""
	default:
		f.set(d)
	}
	if !known {
		return ""
	}
	return before.stored.Name()
}

func (f *Definitions) forget(name string) {
	if old, known := f.byName[name]; known {
		delete(f.byPrefix, old.stored.Prefix)
	}
	delete(f.byName, name)
}

func (f *Definitions) set(d *apiextensionsv1.CustomResourceDefinition) {
	f.forget(d.Name)
	definition, err := crd.New(d)
	if err != nil {
		return // its names are not accepted yet
	}
	st := StoredOf(f.storage, definition)
	f.byName[d.Name], f.byPrefix[st.Prefix] = definitionAt{d, st}, st
}
