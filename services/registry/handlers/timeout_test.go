package handlers

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

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
