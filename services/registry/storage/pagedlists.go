package storage

import (
	"context"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// inPagesKey marks the contexts of WithPagedLists.
type inPagesKey struct{}

// WithPagedLists returns a context whose lists may exceed the bound of a response of etcd. They are read in pages, as
// large as the bound allows, and collected. It is for the deletion of a collection, which must be able to end: the
// bound would keep a namespace or a CRD in deletion for ever.
func WithPagedLists(ctx context.Context) context.Context {
	return context.WithValue(ctx, inPagesKey{}, true)
}

// List implements kubernetes.Interface of etcd's client.
func (r *cachingClient) List(ctx context.Context, prefix string,
	opts etcdkubernetes.ListOptions) (etcdkubernetes.ListResponse, error) {
	all, err := r.Interface.List(ctx, prefix, opts)
	if status.Code(err) != codes.ResourceExhausted || ctx.Value(inPagesKey{}) == nil {
		return all, err
	}
	all = etcdkubernetes.ListResponse{}
	next := opts
	next.Limit = firstPage
	if opts.Limit > 0 {
		next.Limit = min(firstPage, opts.Limit)
	}
	for {
		page, err := r.Interface.List(ctx, prefix, next)
		if status.Code(err) == codes.ResourceExhausted && next.Limit > 1 {
			next.Limit = max(1, next.Limit/4)
			continue
		}
		if err != nil {
			return etcdkubernetes.ListResponse{}, err
		}
		if next.Revision = page.Revision; all.Count == 0 {
			all = page
		} else {
			all.Kvs = append(all.Kvs, page.Kvs...)
		}
		rest := all.Count
		if opts.Limit > 0 {
			rest = min(rest, opts.Limit)
		}
		if rest -= int64(len(all.Kvs)); rest <= 0 || len(page.Kvs) == 0 {
			return all, nil
		}
		next.Continue = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
		next.Limit = min(next.Limit, rest)
	}
}

// firstPage is the first limit of a list that is read in pages, in objects. Most objects are far below 256 KB.
const firstPage = 1000
