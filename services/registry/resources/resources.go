// Package resources finds what is served, built in or custom: the endpoint of a resource, and how its objects are
// stored.
package resources

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
	"watershed.dev/services/registry/apis"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/verbs"
)

// Resources is everything that is served.
type Resources struct {
	BuiltIn *apis.Set
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

// Endpoint finds a resource or subresource; an error is the API's own.
func (r *Resources) Endpoint(ctx context.Context, of *commonv1.Resource) (*verbs.Endpoint, error) {
	if e, ok := r.BuiltIn.Endpoint(of); ok {
		return e, nil
	}
	if e, err := r.Custom.Endpoint(ctx, of); e != nil || err != nil {
		return e, err
	}
	return nil, NotServed(of)
}

// Entries are the catalog's, built in first.
func (r *Resources) Entries() []*registryv1.APIResource {
	return slices.Concat(r.BuiltIn.Entries(), r.Custom.Entries())
}

// Stored finds how a stored resource's objects are read: those of a custom resource by its definition as it is now in
// etcd.
func (r *Resources) Stored(ctx context.Context, name string) (*storage.Stored, error) {
	if st, ok := r.Storage.ByName(name); ok {
		return st, nil
	}
	st, err := r.Custom.Stored(ctx, name)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if st == nil {
		return nil, status.Errorf(codes.NotFound, "no stored resource %q", name)
	}
	return st, nil
}

// Within is ctx with what upstream's storages and strategies look for in it.
func Within(ctx context.Context, verb string, r *commonv1.Resource, u *commonv1.User,
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
