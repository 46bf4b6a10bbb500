package customresources

import (
	"context"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// objectDeleter lists and deletes the objects of a CRD that is being deleted. It builds the CRD's storages only if etcd
// has objects, because most deleted CRDs have none.
type objectDeleter struct {
	set *Set
	crd *servedCRD
}

var _ finalizer.ListerCollectionDeleter = objectDeleter{}

// List implements rest.Lister.
func (d objectDeleter) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	r := d.crd.storageResource
	n, err := r.Etcd.Client.Kubernetes.Count(ctx, r.Prefix, etcdkubernetes.CountOptions{})
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return d.NewList(), nil
	}
	objects, err := d.storage()
	if err != nil {
		return nil, err
	}
	return objects.List(ctx, options)
}

// DeleteCollection implements rest.CollectionDeleter.
func (d objectDeleter) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc,
	options *metav1.DeleteOptions, list *internalversion.ListOptions) (runtime.Object, error) {
	objects, err := d.storage()
	if err != nil {
		return nil, err
	}
	return objects.DeleteCollection(ctx, validate, options, list)
}

// NewList implements rest.Lister.
func (d objectDeleter) NewList() runtime.Object { return &unstructured.UnstructuredList{} }

// ConvertToTable implements rest.Lister.
func (d objectDeleter) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	objects, err := d.storage()
	if err != nil {
		return nil, err
	}
	return objects.ConvertToTable(ctx, object, options)
}

func (d objectDeleter) storage() (finalizer.ListerCollectionDeleter, error) {
	if err := d.crd.buildOnce(d.set); err != nil {
		return nil, err
	}
	return d.crd.versions[d.crd.StorageVersion].storage.CustomResource, nil
}
