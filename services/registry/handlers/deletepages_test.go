package handlers

import (
	"context"
	"strconv"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
	api "k8s.io/kubernetes/pkg/apis/core"
)

// boundedDeleter deletes objects of these sizes. It reads at most bound bytes at a time, as etcd's client does.
type boundedDeleter struct {
	sizes   []int
	bound   int
	deleted int
	calls   int
}

func (d *boundedDeleter) DeleteCollection(_ context.Context, _ rest.ValidateObjectFunc, _ *metav1.DeleteOptions,
	o *internalversion.ListOptions) (runtime.Object, error) {
	d.calls++
	begin, _ := strconv.Atoi(o.Continue)
	end := len(d.sizes)
	if o.Limit > 0 {
		end = min(end, begin+int(o.Limit))
	}
	bytes, list := 0, &api.ConfigMapList{}
	for _, size := range d.sizes[begin:end] {
		bytes += size
		list.Items = append(list.Items, api.ConfigMap{})
	}
	if bytes > d.bound {
		return nil, status.Error(codes.ResourceExhausted, "received message larger than max")
	}
	d.deleted += end - begin
	if end < len(d.sizes) {
		list.Continue = strconv.Itoa(end)
	}
	return list, nil
}

// A collection whose objects exceed the bound of a response of etcd can be deleted, and its response has no items.
func TestALargeCollectionIsDeletedInPages(t *testing.T) {
	sizes := make([]int, 6000)
	for i := range sizes {
		sizes[i] = 10
		if i > 4000 {
			sizes[i] = 1000
		}
	}
	d := &boundedDeleter{sizes: sizes, bound: 50_000}
	list, err := DeleteInPages(t.Context(), d, nil, nil, &internalversion.ListOptions{ResourceVersion: "7"})
	if err != nil || d.deleted != len(sizes) || len(list.(*api.ConfigMapList).Items) != 0 || d.calls > 80 {
		t.Errorf("%d objects of %d in %d calls, %v, %v", d.deleted, len(sizes), d.calls, list, err)
	}
	d = &boundedDeleter{sizes: sizes, bound: 1 << 30}
	list, err = DeleteInPages(t.Context(), d, nil, nil, &internalversion.ListOptions{})
	if err != nil || len(list.(*api.ConfigMapList).Items) != len(sizes) || d.calls != 1 {
		t.Errorf("a small collection: %d items in %d calls, %v", len(list.(*api.ConfigMapList).Items), d.calls, err)
	}
	d = &boundedDeleter{sizes: []int{10, 60_000}, bound: 50_000}
	for _, o := range []*internalversion.ListOptions{{}, {Limit: 2}} {
		if _, err := DeleteInPages(t.Context(), d, nil, nil, o); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("limit %d: an object above the bound: %v", o.Limit, err)
		}
	}
}
