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
)

// boundedLists is a client of an etcd with the keys /a/00000, /a/00001 and so on. A response has at most bound bytes.
type boundedLists struct {
	etcdkubernetes.Interface
	sizes []int
	bound int
	lists int
}

func (c *boundedLists) List(_ context.Context, prefix string,
	o etcdkubernetes.ListOptions) (resp etcdkubernetes.ListResponse, err error) {
	c.lists++
	resp.Revision = 7
	if o.Continue != "" && o.Revision != 7 {
		return resp, fmt.Errorf("a page of revision %d", o.Revision)
	}
	bytes := 0
	for i, size := range c.sizes {
		key := fmt.Sprintf("%s%05d", prefix, i)
		if key < o.Continue {
			continue
		}
		if resp.Count++; o.Limit > 0 && int64(len(resp.Kvs)) == o.Limit {
			continue
		}
		resp.Kvs = append(resp.Kvs, &mvccpb.KeyValue{Key: []byte(key)})
		if bytes += size; bytes > c.bound {
			return resp, status.Error(codes.ResourceExhausted, "received message larger than max")
		}
	}
	return resp, nil
}

// A list for a deletion may exceed the bound of a response. Other lists may not.
func TestListsForADeletionAreReadInPages(t *testing.T) {
	sizes := make([]int, 3000)
	for i := range sizes {
		sizes[i] = 10
		if i > 2000 {
			sizes[i] = 1000
		}
	}
	const bound = 50_000
	for _, x := range []struct {
		limit int64
		want  int
	}{{0, 3000}, {10_000, 3000}, {2500, 2500}, {1000, 1000}} {
		etcd := &boundedLists{sizes: sizes, bound: bound}
		c := &cachingClient{Interface: etcd}
		o := etcdkubernetes.ListOptions{Limit: x.limit}
		if x.limit != 1000 {
			if _, err := c.List(t.Context(), "/a/", o); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("limit %d: %v", x.limit, err)
			}
		}
		got, err := c.List(WithPagedLists(t.Context()), "/a/", o)
		if err != nil || len(got.Kvs) != x.want || got.Count != 3000 || got.Revision != 7 {
			t.Errorf("limit %d: %d objects of %d at %d, %v", x.limit, len(got.Kvs), got.Count, got.Revision, err)
		}
		for i, kv := range got.Kvs {
			if want := fmt.Sprintf("%05d", i); !strings.HasSuffix(string(kv.Key), want) {
				t.Fatalf("limit %d: object %d is %s", x.limit, i, kv.Key)
			}
		}
		if etcd.lists > 100 {
			t.Errorf("limit %d: %d lists", x.limit, etcd.lists)
		}
	}
	etcd := &boundedLists{sizes: []int{10, bound + 1}, bound: bound}
	if _, err := (&cachingClient{Interface: etcd}).List(WithPagedLists(t.Context()), "/a/",
		etcdkubernetes.ListOptions{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("an object above the bound: %v", err)
	}
}
