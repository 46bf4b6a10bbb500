package lookup_test

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/lookup"
)

// RequestScope finds a resource by group, version, resource and subresource. For others it returns the API's 404.
func TestRequestScope(t *testing.T) {
	fx := fixture.New(t)
	for _, c := range []struct {
		r     *commonv1.Resource
		found bool
	}{
		{&commonv1.Resource{Version: "v1", Resource: "pods"}, true},
		{&commonv1.Resource{Version: "v1", Resource: "pods", Subresource: "eviction"}, true},
		{&commonv1.Resource{Version: "v1", Resource: "pods", Subresource: "nothing"}, false},
		{&commonv1.Resource{Version: "v2", Resource: "pods"}, false},
		{&commonv1.Resource{Group: "apps", Version: "v1", Resource: "deployments"}, true},
		{&commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}, false},
	} {
		scope, err := fx.Resources.RequestScope(t.Context(), c.r)
		if (err == nil) != c.found || c.found && scope == nil || !c.found && !apierrors.IsNotFound(err) {
			t.Errorf("%v: %v, %v", c.r, scope, err)
		}
	}
	if st, err := fx.Resources.StorageResource(t.Context(), "deployments.apps"); err != nil ||
		st.Name() != "deployments.apps" {
		t.Errorf("%v, %v", st, err)
	}
	if _, err := fx.Resources.StorageResource(t.Context(), "widgets.example.com"); status.Code(err) != codes.NotFound {
		t.Errorf("%v", err)
	}
}

// Storages and strategies find the user and the request in the context.
func TestWithRequestInfo(t *testing.T) {
	ctx := lookup.WithRequestInfo(t.Context(), "update", &commonv1.Resource{
		Group:       "apps",
		Version:     "v1",
		Resource:    "deployments",
		Subresource: "scale",
	}, &commonv1.User{Name: "jane"}, "x", "d")
	info, ok := request.RequestInfoFrom(ctx)
	if !ok || info.APIPrefix != "apis" || info.Verb != "update" || info.Subresource != "scale" || info.Name != "d" {
		t.Errorf("%+v", info)
	}
	if u, ok := request.UserFrom(ctx); !ok || u.GetName() != "jane" {
		t.Errorf("%v", u)
	}
}
