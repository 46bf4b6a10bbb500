package handlers

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// hanging is a storage whose deletions block until their contexts end.
type hanging struct{ rest.Storage }

func (hanging) Delete(ctx context.Context, _ string, _ rest.ValidateObjectFunc,
	_ *metav1.DeleteOptions) (runtime.Object, bool, error) {
	<-ctx.Done()
	return nil, false, ctx.Err()
}

func (hanging) DeleteCollection(ctx context.Context, _ rest.ValidateObjectFunc, _ *metav1.DeleteOptions,
	_ *internalversion.ListOptions) (runtime.Object, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A write returns 504 after 34 s. A deletecollection ends only at its request's own deadline. Both are as in
// kube-apiserver.
func TestWriteTimeout(t *testing.T) {
	for verb, want := range map[string]time.Duration{"delete": 34 * time.Second, "deletecollection": time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			began := time.Now()
			e := &RequestScope{Storage: hanging{}, APIResource: &registryv1.APIResource{}}
			_, err := e.Write(ctx, &registryv1.WriteRequest{Verb: verb, Name: "n"}, nil)
			if took := time.Since(began); !apierrors.IsTimeout(err) || took != want {
				t.Errorf("%s: %v after %v, want a timeout after %v", verb, err, took, want)
			}
		})
	}
}

// failing is a storage whose deletions fail with an error.
type failing struct {
	rest.Storage
	err error
}

func (f failing) Delete(context.Context, string, rest.ValidateObjectFunc,
	*metav1.DeleteOptions) (runtime.Object, bool, error) {
	return nil, false, f.err
}

// A write that loses etcd is 500 with the text of etcd's client, as from kube-apiserver. The gateway's error for a lost
// registry would have another code.
func TestWritesWithoutEtcd(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		code int32
	}{
		"a lost connection": {grpcstatus.Error(codes.Unavailable, "error reading from server: EOF"), 500},
		"an error of etcd":  {rpctypes.ErrLeaderChanged, 500},
		"an API error":      {apierrors.NewServiceUnavailable("starting"), 503},
	} {
		scope := &RequestScope{Storage: failing{err: c.err}, APIResource: &registryv1.APIResource{}}
		_, err := scope.Write(t.Context(), &registryv1.WriteRequest{Verb: "delete", Name: "n"}, nil)
		var api apierrors.APIStatus
		if !errors.As(rpc.FromStatus(rpc.ToStatus(err)), &api) || api.Status().Code != c.code ||
			!strings.HasSuffix(api.Status().Message, c.err.Error()) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
