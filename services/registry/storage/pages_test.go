package storage

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
)

// boundedStore is an etcd whose responses have at most bound bytes. The size of the object n is sizes[n].
type boundedStore struct {
	etcdkubernetes.Interface
	sizes []int
	bound int
	// revision is the revision of the next response.
	revision int64
	// read has the revision that each call requested.
	read []int64
}

func keyOf(n int) string { return fmt.Sprintf("/p/%04d", n) }

// List implements etcdkubernetes.Interface.
func (s *boundedStore) List(_ context.Context, prefix string,
	o etcdkubernetes.ListOptions) (r etcdkubernetes.ListResponse, err error) {
	s.revision++
	s.read = append(s.read, o.Revision)
	from, bytes := max(prefix, o.Continue), 0
	for n, size := range s.sizes {
		if keyOf(n) < from {
			continue
		}
		r.Count++
		if o.Limit == 0 || int64(len(r.Kvs)) < o.Limit {
			r.Kvs = append(r.Kvs, &mvccpb.KeyValue{Key: []byte(keyOf(n))})
			bytes += size
		}
	}
	r.Revision = s.revision // as of etcd: the current revision, also if another is requested
	if bytes > s.bound {
		return r, status.Error(codes.ResourceExhausted, "grpc: received message larger than max")
	}
	return r, nil
}

func asService(t *testing.T) context.Context {
	return request.WithUser(t.Context(),
		&user.DefaultInfo{Name: identity.Authz, Groups: []string{identity.ServicesGroup}})
}

func TestAListOfAClientAboveTheBoundFails(t *testing.T) {
	s := &boundedStore{sizes: []int{90, 90, 90}, bound: 200}
	client := request.WithUser(t.Context(), &user.DefaultInfo{Name: "a", Groups: []string{user.SystemPrivilegedGroup}})
	for _, ctx := range []context.Context{t.Context(), client} {
		r, err := pagedLists{s}.List(ctx, "/p/", etcdkubernetes.ListOptions{Limit: 3})
		if status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%d objects, %v", len(r.Kvs), err)
		}
	}
}

func TestAListAboveTheBoundIsReadInPages(t *testing.T) {
	sizes := make([]int, 1000)
	for n := range sizes {
		sizes[n] = 1
	}
	copy(sizes[500:], []int{90, 90, 90, 90, 90, 90, 90, 90}) // each needs its own page
	s := &boundedStore{sizes: sizes, bound: 130, revision: 6}
	all, err := pagedLists{s}.List(asService(t), "/p/", etcdkubernetes.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(all.Kvs) != len(sizes) || all.Count != int64(len(sizes)) {
		t.Errorf("%d objects, and a count of %d", len(all.Kvs), all.Count)
	}
	for n, kv := range all.Kvs {
		if string(kv.Key) != keyOf(n) {
			t.Fatalf("object %d has the key %s", n, kv.Key)
		}
	}
	for n, at := range s.read[2:] { // after the read that failed, and the first page
		if at != all.Revision {
			t.Errorf("page %d is read at revision %d of %d", n, at, all.Revision)
		}
	}
	s.read = nil
	if _, err = (pagedLists{s}).List(asService(t), "/p/", etcdkubernetes.ListOptions{Revision: 3}); err != nil {
		t.Fatal(err)
	}
	for n, at := range s.read {
		if at != 3 {
			t.Errorf("page %d of revision 3 is read at revision %d", n, at)
		}
	}
}

func TestALimitedListAboveTheBound(t *testing.T) {
	s := &boundedStore{sizes: []int{90, 90, 90, 90, 90, 90, 90}, bound: 300}
	some, err := pagedLists{s}.List(asService(t), "/p/", etcdkubernetes.ListOptions{Limit: 5, Continue: keyOf(1)})
	if err != nil {
		t.Fatal(err)
	}
	if len(some.Kvs) != 5 || some.Count != 6 || string(some.Kvs[0].Key) != keyOf(1) ||
		string(some.Kvs[4].Key) != keyOf(5) {
		t.Errorf("%d of %d objects: %s", len(some.Kvs), some.Count, some.Kvs)
	}
	s.bound = 50
	_, err = pagedLists{s}.List(asService(t), "/p/", etcdkubernetes.ListOptions{})
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "larger than max") {
		t.Errorf("an object above the bound: %v", err)
	}
}
