// Package resources finds what is served, built in or custom: the endpoint of a resource, and how its objects are
// stored.
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

// Resources is everything that is served.
type Resources struct {
	BuiltIn *installer.Set
	Custom  *customresources.Set
	Storage *storage.Storage
}

// NotServed is the API's error for a resource that there is not.
func NotServed(r *commonv1.Resource) error {
	return apierrors.NewGenericServerResponse(404, "", schema.GroupResource{
		Group:    r.GetGroup(),
		Resource: r.GetResource(),
	}, "", "404 page not found", 0, true)
}

// RequestScope finds a resource or subresource; an error is the API's own.
func (r *Resources) RequestScope(ctx context.Context, resource *commonv1.Resource) (*handlers.RequestScope, error) {
	if scope, ok := r.BuiltIn.RequestScope(resource); ok {
		return scope, nil
	}
	if scope, err := r.Custom.RequestScope(ctx, resource); scope != nil || err != nil {
		return scope, err
	}
	return nil, NotServed(resource)
}

// APIResources are the catalog's, built in first.
func (r *Resources) APIResources() []*registryv1.APIResource {
	return slices.Concat(r.BuiltIn.APIResources(), r.Custom.APIResources())
}

// StorageResource finds how a stored resource's objects are read: those of a custom resource by its definition as it is now in
// etcd.
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

// WithRequestInfo is ctx with what upstream's storages and strategies look for in it.
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
