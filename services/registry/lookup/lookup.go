// Package lookup finds served resources, built in or custom: the RequestScope of a resource, and how etcd stores its
// objects. It holds no state of its own and starts no goroutine.
package lookup

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// Resources is the set of all served resources.
type Resources struct {
	BuiltIn *installer.Set
	Custom  *customresources.Set
	Storage *storage.Storage
}

// NotServed returns kube-apiserver's 404 for a resource that is not served.
func NotServed(r *commonv1.Resource) error {
	return apierrors.NewGenericServerResponse(404, "", schema.GroupResource{
		Group:    r.GetGroup(),
		Resource: r.GetResource(),
	}, "", "404 page not found", 0, true)
}

// RequestScope returns the scope of a resource or subresource. An error is an API status.
func (r *Resources) RequestScope(ctx context.Context, resource *commonv1.Resource) (*handlers.RequestScope, error) {
	scope, _, err := r.WriteScope(ctx, resource)
	return scope, err
}

// WriteScope returns the scope of a resource, and the definition of a custom resource that it is built from.
func (r *Resources) WriteScope(ctx context.Context, resource *commonv1.Resource) (*handlers.RequestScope,
	*storage.Definition, error) {
	if scope, ok := r.BuiltIn.RequestScope(resource); ok {
		return scope, nil, nil
	}
	if scope, definition, err := r.Custom.RequestScope(ctx, resource); scope != nil || err != nil {
		return scope, definition, err
	}
	return nil, nil, NotServed(resource)
}

// APIResources returns all served resources, built-in resources first.
func (r *Resources) APIResources() []*registryv1.APIResource {
	return slices.Concat(r.BuiltIn.APIResources(), r.Custom.APIResources())
}

// StorageResource returns a stored resource by name. A custom resource has the decoding of its CRD as etcd has it now.
func (r *Resources) StorageResource(ctx context.Context, name string) (*storage.Resource, error) {
	if st, ok := r.Storage.ByName(name); ok {
		return st, nil
	}
	st, err := r.Custom.StorageResource(ctx, name)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if st == nil {
		return nil, status.Errorf(codes.NotFound, "no stored resource %q", name)
	}
	return st, nil
}

// WithRequestInfo returns ctx with the user and RequestInfo that upstream's storages and strategies read from it.
func WithRequestInfo(ctx context.Context, verb string, r *commonv1.Resource, u *commonv1.User,
	namespace, name string) context.Context {
	prefix := "apis"
	if r.GetGroup() == "" {
		prefix = "api"
	}
	ctx = request.WithUser(ctx, identity.User(u))
	return request.WithRequestInfo(ctx, &request.RequestInfo{
		IsResourceRequest: true,
		Verb:              verb,
		APIPrefix:         prefix,
		APIGroup:          r.GetGroup(),
		APIVersion:        r.GetVersion(),
		Resource:          r.GetResource(),
		Subresource:       r.GetSubresource(),
		Namespace:         namespace,
		Name:              name,
	})
}
