package customresources

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"watershed.dev/services/registry/handlers"
)

// objectDeleter lists and deletes the objects of a CRD that is being deleted. It builds the CRD's storages only for a
// deletion, because most deleted CRDs have no objects.
type objectDeleter struct {
	set *Set
	crd *servedCRD
}

var _ finalizer.ListerCollectionDeleter = objectDeleter{}

// List implements rest.Lister. It returns an object for each namespace that has objects, and reads only their keys: the
// finalizer needs the namespaces, and whether any object is left.
func (d objectDeleter) List(ctx context.Context, _ *internalversion.ListOptions) (runtime.Object, error) {
	r, list := d.crd.storageResource, &unstructured.UnstructuredList{}
	for key, end := r.Prefix, clientv3.GetPrefixRangeEnd(r.Prefix); ; {
		resp, err := r.Etcd.Client.Client.Get(ctx, key, clientv3.WithRange(end), clientv3.WithKeysOnly(),
			clientv3.WithLimit(1))
		if err != nil || len(resp.Kvs) == 0 {
			return list, err
		}
		namespace, name := r.SplitKey(string(resp.Kvs[0].Key))
		object := unstructured.Unstructured{}
		object.SetNamespace(namespace)
		object.SetName(name)
		list.Items = append(list.Items, object)
		if namespace == "" {
			return list, nil
		}
		key = clientv3.GetPrefixRangeEnd(r.Key(namespace, ""))
	}
}

// DeleteCollection implements rest.CollectionDeleter.
func (d objectDeleter) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc,
	options *metav1.DeleteOptions, list *internalversion.ListOptions) (runtime.Object, error) {
	objects, err := d.objects()
	if err != nil {
		return nil, err
	}
	return handlers.DeleteInPages(ctx, objects, validate, options, list)
}

// NewList implements rest.Lister.
func (d objectDeleter) NewList() runtime.Object { return &unstructured.UnstructuredList{} }

// ConvertToTable implements rest.Lister.
func (d objectDeleter) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	objects, err := d.objects()
	if err != nil {
		return nil, err
	}
	return objects.ConvertToTable(ctx, object, options)
}

func (d objectDeleter) objects() (finalizer.ListerCollectionDeleter, error) {
	if err := d.crd.buildOnce(d.set); err != nil {
		return nil, err
	}
	return d.crd.versions[d.crd.StorageVersion].storage.CustomResource, nil
}
