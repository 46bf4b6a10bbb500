// Package policy answers authn, authz and admission, who decide by what they read: lists from etcd, and events from the
// tail of the log that registry itself reads.
package internalwatch

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/fields"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/watchcache"
)

// InternalWatch answers them.
type InternalWatch struct {
	watchfanoutv1.UnimplementedInternalWatchServer
	resources *lookup.Resources
	source    *source.Source
	cache     *watchcache.Cache
	draining  chan struct{}
	drainOnce sync.Once
	// listSlots are the turns of lists: each is a whole resource in memory.
	listSlots chan struct{}
}

// maxConcurrentLists is how many lists are read at a time.
const maxConcurrentLists = 4

// New returns a policy of what is served, whose events t has.
func New(r *lookup.Resources, s *source.Source, cache *watchcache.Cache) *InternalWatch {
	return &InternalWatch{
		resources: r,
		source:    s,
		cache:     cache,
		draining:  make(chan struct{}),
		listSlots: make(chan struct{}, maxConcurrentLists),
	}
}

// Drain ends every watch, so that the gateways resume them on another registry.
func (p *InternalWatch) Drain() { p.drainOnce.Do(func() { close(p.draining) }) }

// isSingleObject says whether a query is of one object.
func (p *InternalWatch) isSingleObject(ctx context.Context, q *watchfanoutv1.Query) (bool, error) {
	if _, named := exactName(q.GetFieldSelector()); !named {
		return false, nil
	}
	scope, err := p.resources.RequestScope(ctx, q.GetResource())
	if err != nil {
		return false, err
	}
	return !scope.APIResource.GetNamespaced() || q.GetNamespace() != "", nil
}

// List answers a whole list as it is in etcd.
func (p *InternalWatch) List(
	r *watchfanoutv1.ListRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk],
) error {
	limited := r.Limit != 0 && r.ResourceVersion != "0" // with "0" a limit does not count
	if limited || r.Continue != "" || r.ResourceVersionMatch == "Exact" {
		return rpc.ErrDelegate
	}
	ctx := stream.Context()
	// A list of one object waits for no other: how fresh policy is is asked by one.
	single, err := p.isSingleObject(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	if !single {
		select {
		case p.listSlots <- struct{}{}:
			defer func() { <-p.listSlots }()
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
	v, err := p.view(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	rows, err := v.readRows(ctx, r.ResourceVersion)
	if err != nil {
		return rpc.ToStatus(err)
	}
	items := make([][]byte, len(rows))
	for i, row := range rows {
		if !v.canUseLogEncoding(row.Version) {
			return rpc.ErrDelegate
		}
		if items[i], err = v.form.Item(row.Json, row.Protobuf); err != nil {
			return rpc.ToStatus(err)
		}
	}
	gv := &commonv1.Kind{Group: v.apiResource.Resource.Group, Version: v.apiResource.Resource.Version}
	list := &frame.List{
		Kind:         v.apiResource.ListKind,
		Revision:     v.revision,
		Unstructured: v.form.Unstructured && !v.form.Partial,
		APIVersion:   frame.APIVersion(gv),
	}
	if v.form.Partial {
		list.Kind, list.APIVersion = v.form.Kind+"List", v.form.APIVersion
	}
	out := &frame.Chunks{Bytes: frame.ChunkBytes, Send: func(pieces [][]byte, size int64) error {
		return stream.Send(&watchfanoutv1.ListChunk{Data: pieces, Size: size})
	}}
	return list.Body(v.form.Protobuf, v.form.Items(items)).Send(out)
}

// view is which objects are read, and in which form.
type view struct {
	server          *InternalWatch
	apiResource     *registryv1.APIResource
	output          *registryv1.Output
	form            frame.Encoding
	storageResource *storage.Resource
	selector        watchcache.Selector
	// revision was etcd's before the definition was read that objects are read by: a later one is told of after it.
	revision int64
	// prefix is where in etcd all that is selected lies.
	prefix string
	// skipUnreadable: what cannot be read is left out in place of the whole being refused.
	skipUnreadable bool
	// native: the log's encodings are in the version asked for.
	native bool
}

func (p *InternalWatch) view(ctx context.Context, q *watchfanoutv1.Query) (*view, error) {
	revision, err := p.source.ReadRevision(ctx)
	if err != nil {
		return nil, err
	}
	scope, err := p.resources.RequestScope(ctx, q.GetResource())
	if err != nil {
		return nil, err
	}
	apiResource, as := scope.APIResource, q.GetOutput().GetAs()
	if apiResource.GetStorageResource() == "" || !supportedOutput(q.GetOutput()) ||
		q.GetNamespace() != "" && !apiResource.Namespaced {
		return nil, rpc.ErrDelegate
	}
	v := &view{
		server:         p,
		revision:       revision,
		apiResource:    apiResource,
		output:         q.GetOutput(),
		skipUnreadable: q.GetSkipUnreadable(),
	}
	v.form = frame.EncodingOf(apiResource.Kind, as, q.GetOutput().GetMediaType(), apiResource.Unstructured)
	k, storedKind := apiResource.Kind, apiResource.StoredKind
	v.native = k.Group == storedKind.Group && k.Version == storedKind.Version && k.Kind == storedKind.Kind
	if v.storageResource, err = p.resources.StorageResource(ctx, apiResource.StorageResource); err != nil {
		return nil, err
	}
	v.prefix = v.storageResource.Prefix
	namespace := ""
	if apiResource.Namespaced && q.GetNamespace() != "" {
		namespace = q.GetNamespace()
		v.prefix += namespace + "/"
	}
	if name, ok := exactName(q.GetFieldSelector()); ok && (namespace != "" || !apiResource.Namespaced) {
		v.prefix += name // and what else begins so, which is not selected
	}
	if apiResource.ConvertedFields && convertedField(q.GetFieldSelector()) {
		return nil, rpc.ErrDelegate
	}
	v.selector, err = watchcache.NewSelector(namespace, q.GetLabelSelector(), q.GetFieldSelector())
	return v, err
}

// supportedOutput says whether objects are written in a form.
func supportedOutput(o *registryv1.Output) bool {
	return slices.Contains([]string{frame.JSON, frame.Protobuf}, o.GetMediaType()) &&
		slices.Contains([]string{"", "PartialObjectMetadata", "PartialObjectMetadataList"}, o.GetAs().GetKind())
}

// convertedField says whether a selector names what only converting an object can tell.
func convertedField(selector string) bool {
	fs, err := fields.ParseSelector(selector)
	return err == nil && slices.ContainsFunc(fs.Requirements(), func(r fields.Requirement) bool {
		return !strings.HasPrefix(r.Field, "metadata.")
	})
}

// exactName is the one name that a field selector allows.
func exactName(selector string) (string, bool) {
	fs, err := fields.ParseSelector(selector)
	if err != nil {
		return "", false
	}
	name, ok := fs.RequiresExactMatch("metadata.name")
	return name, ok && len(content.IsPathSegmentName(name)) == 0
}

// canUseLogEncoding says whether the log's encodings of an object are what is asked for. version is the one that an object of a
// custom resource is in.
func (v *view) canUseLogEncoding(version string) bool {
	switch {
	case v.form.Partial: // metadata is the same in every version
		return true
	case v.apiResource.Unstructured:
		return version == v.apiResource.Kind.Version && !v.form.Protobuf
	}
	return v.native
}

// readRows are the objects that are selected, as etcd had them at the view's revision, which is not to be
// older than resourceVersion.
func (v *view) readRows(ctx context.Context, resourceVersion string) ([]*registryv1.Row, error) {
	if resourceVersion != "" {
		if minRevision, err := strconv.ParseInt(resourceVersion, 10, 64); err != nil || minRevision > v.revision {
			return nil, rpc.ErrDelegate // which knows in which words that is refused
		}
	}
	var out []*registryv1.Row
	err := v.server.source.ReadPages(ctx, v.prefix, v.revision, func(kvs []*mvccpb.KeyValue) error {
		for _, row := range source.EncodeRows(ctx, v.storageResource, kvs) {
			switch {
			case row.Unreadable == "":
				if v.selector(row.Namespace, &logv1.Object{Labels: row.Labels, Fields: row.Fields}) {
					out = append(out, row)
				}
			case !v.skipUnreadable:
				return apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s",
					row.Namespace+"/"+row.Name, row.Unreadable))
			}
		}
		return nil
	})
	return out, err
}
