package storage

import (
	"context"
	"slices"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
)

const (
	// firstPage is the page size of the first read of ReadPages, in objects. Each next page has as many objects as make
	// pageBytes at the last page's average size, at most maxPage. Objects have between 100 bytes and 3 MB.
	firstPage = 20
	maxPage   = 2000
	pageBytes = 8 << 20
	// maxRangeBytes bounds a response of etcd.
	maxRangeBytes = 256 << 20
	// largePage is the page size of a list whose single response would exceed maxRangeBytes, in objects.
	largePage = 128
)

// ReadPages reads all keys with a prefix at a revision, in pages of about pageBytes. If the caller needs no values,
// only every second page has them. etcd holds the values of each page in memory, also of a page without them. A small
// page with values therefore precedes each page without: its average size limits the next page to about pageBytes in
// etcd. etcd counts all keys after a page, so small pages of many keys would take quadratic time.
func (e *Etcd) ReadPages(ctx context.Context, prefix string, revision int64, needsValues bool,
	each func([]*mvccpb.KeyValue) error) error {
	key, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	limit, withValues := int64(firstPage), true
	measured := limit // the last limit that was computed from the size of values
	for {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(limit), clientv3.WithRev(revision)}
		if !withValues {
			opts = append(opts, clientv3.WithKeysOnly())
		}
		resp, err := e.Client.Client.Get(ctx, key, opts...)
		if status.Code(err) == codes.ResourceExhausted && limit > 1 { // these objects are larger than the last
			limit = max(1, limit/4)
			measured = limit
			continue
		}
		if err != nil {
			return err
		}
		if err := each(resp.Kvs); err != nil {
			return err
		}
		if !resp.More {
			return nil
		}
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		if !withValues {
			limit, withValues = firstPage, true
			continue
		}
		measured = min(maxPage, pageFor(resp.Kvs), 4*measured)
		limit, withValues = measured, needsValues
	}
}

// pageFor returns how many objects of the average size of these make pageBytes, at least 1.
func pageFor(kvs []*mvccpb.KeyValue) int64 {
	bytes := int64(0)
	for _, kv := range kvs {
		bytes += int64(len(kv.Value))
	}
	return max(1, pageBytes*int64(len(kvs))/max(1, bytes))
}

// pagedLists splits lists of upstream's storage whose response exceeds maxRangeBytes, if the informers of registry,
// authn, authz and admission request them. Without them nothing is served. Other lists fail, because clients should not
// make registry hold so much. Upstream's client accepts 2 GB (k8s.io/apiserver/pkg/storage/storagebackend/factory).
type pagedLists struct{ etcdkubernetes.Interface }

// List implements etcdkubernetes.Interface.
func (l pagedLists) List(ctx context.Context, prefix string,
	o etcdkubernetes.ListOptions) (etcdkubernetes.ListResponse, error) {
	all, err := l.Interface.List(ctx, prefix, o)
	if !isTooLarge(err) || o.Limit == 1 || !ofService(ctx) {
		return all, err
	}
	all = etcdkubernetes.ListResponse{}
	wanted := o.Limit // 0: all objects
	for limit := int64(largePage); ; {
		o.Limit = limit
		if wanted > 0 {
			o.Limit = min(limit, wanted-int64(len(all.Kvs)))
		}
		page, err := l.Interface.List(ctx, prefix, o)
		if isTooLarge(err) && o.Limit > 1 {
			limit = max(1, o.Limit/4)
			continue
		}
		if err != nil {
			return page, err
		}
		if all.Kvs == nil {
			all.Count, all.Revision = page.Count, page.Revision
		}
		if o.Revision == 0 {
			o.Revision = page.Revision
		}
		all.Kvs = append(all.Kvs, page.Kvs...)
		n := int64(len(page.Kvs))
		if n >= page.Count || int64(len(all.Kvs)) == wanted {
			return all, nil
		}
		o.Continue = string(page.Kvs[n-1].Key) + "\x00"
		limit = min(largePage, 2*n) // objects after large objects may be small
	}
}

// ofService reports whether a request is from a service, or from registry itself (services/registry/loopback).
func ofService(ctx context.Context) bool {
	u, ok := request.UserFrom(ctx)
	return ok && (u.GetName() == user.APIServerUser || slices.Contains(u.GetGroups(), identity.ServicesGroup))
}

// isTooLarge reports whether a response exceeded maxRangeBytes. etcd's own errors have no gRPC status.
func isTooLarge(err error) bool { return status.Code(err) == codes.ResourceExhausted }
