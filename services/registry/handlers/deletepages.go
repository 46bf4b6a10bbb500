package handlers

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
)

// firstDeletePage is the first limit of a deletion in pages, in objects.
const firstDeletePage = 2500

// DeleteInPages deletes a collection. Upstream reads 10,000 objects at a time, which may exceed the bound of a response
// of etcd. A namespace or a CRD would then be in deletion for ever. DeleteInPages continues in smaller pages, and
// returns a list without items, because all deleted objects together need not fit into memory. If list has a limit, the
// error is the caller's.
func DeleteInPages(ctx context.Context, deleter rest.CollectionDeleter, validate rest.ValidateObjectFunc,
	options *metav1.DeleteOptions, list *internalversion.ListOptions) (runtime.Object, error) {
	deleted, err := deleter.DeleteCollection(ctx, validate, options, list)
	if status.Code(err) != codes.ResourceExhausted || list != nil && list.Limit > 0 {
		return deleted, err
	}
	page := &internalversion.ListOptions{}
	if list != nil {
		page = list.DeepCopy()
	}
	for page.Limit = firstDeletePage; ; {
		deleted, err := deleter.DeleteCollection(ctx, validate, options, page)
		if status.Code(err) == codes.ResourceExhausted && page.Limit > 1 {
			page.Limit = max(1, page.Limit/4)
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := meta.ListAccessor(deleted)
		if err != nil {
			return nil, err
		}
		if m.GetContinue() == "" {
			return deleted, meta.SetList(deleted, nil)
		}
		page.Continue, page.ResourceVersion, page.ResourceVersionMatch = m.GetContinue(), "", ""
	}
}
