// Package internalwatch implements the InternalWatch contract for authn, authz and admission, which decide by these
// reads. Lists come from etcd. Watch events come from the registry's own watch cache.
//
// The watch tier must not serve these reads, because a compromised replica could then grant itself any permission. Each
// List and Watch runs in the goroutine of its call. A watch owns its position.
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

// InternalWatch serves the lists and watches.
type InternalWatch struct {
	watchfanoutv1.UnimplementedInternalWatchServer
	resources *lookup.Resources
	source    *source.Source
	cache     *watchcache.Cache
	draining  chan struct{}
	drainOnce sync.Once
	// listSlots is a semaphore of lists, because a list holds a whole resource in memory.
	listSlots chan struct{}
}

// maxConcurrentLists is how many lists are read at a time.
const maxConcurrentLists = 4

// New returns a server of the resources. Its watches read events from cache.
func New(r *lookup.Resources, s *source.Source, cache *watchcache.Cache) *InternalWatch {
	return &InternalWatch{
		resources: r,
		source:    s,
		cache:     cache,
		draining:  make(chan struct{}),
		listSlots: make(chan struct{}, maxConcurrentLists),
	}
}

// Drain ends every watch, so that the gateways resume them at another registry.
func (p *InternalWatch) Drain() { p.drainOnce.Do(func() { close(p.draining) }) }

// isSingleObject reports whether a query selects a single object by name.
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

// List sends a whole list as etcd has it.
func (p *InternalWatch) List(
	r *watchfanoutv1.ListRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk],
) error {
	limited := r.Limit != 0 && r.ResourceVersion != "0" // resourceVersion "0" makes the limit void
	if limited || r.Continue != "" || r.ResourceVersionMatch == "Exact" {
		return rpc.ErrDelegate
	}
	ctx := stream.Context()
	// A list of a single object does not wait for a slot: authn, authz and admission measure their freshness with it.
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

// view is a query's selection of objects, and their encoding.
type view struct {
	server          *InternalWatch
	apiResource     *registryv1.APIResource
	output          *registryv1.Output
	form            frame.Encoding
	storageResource *storage.Resource
	selector        watchcache.Selector
	// revision is etcd's before the view read the CRD. A later change of the CRD is in the log after revision.
	revision int64
	// prefix is the etcd prefix of all selected objects.
	prefix string
	// skipUnreadable: objects that cannot be decoded are skipped. Otherwise they fail the list.
	skipUnreadable bool
	// native: the log's encodings are in the requested version.
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
		v.prefix += name // and longer names, which the selector excludes
	}
	if apiResource.ConvertedFields && convertedField(q.GetFieldSelector()) {
		return nil, rpc.ErrDelegate
	}
	v.selector, err = watchcache.NewSelector(namespace, q.GetLabelSelector(), q.GetFieldSelector())
	return v, err
}

// supportedOutput reports whether the package can encode an output.
func supportedOutput(o *registryv1.Output) bool {
	return slices.Contains([]string{frame.JSON, frame.Protobuf}, o.GetMediaType()) &&
		slices.Contains([]string{"", "PartialObjectMetadata", "PartialObjectMetadataList"}, o.GetAs().GetKind())
}

// convertedField reports whether a selector has a field that only a converted object has.
func convertedField(selector string) bool {
	fs, err := fields.ParseSelector(selector)
	return err == nil && slices.ContainsFunc(fs.Requirements(), func(r fields.Requirement) bool {
		return !strings.HasPrefix(r.Field, "metadata.")
	})
}

// exactName returns the name that a field selector requires.
func exactName(selector string) (string, bool) {
	fs, err := fields.ParseSelector(selector)
	if err != nil {
		return "", false
	}
	name, ok := fs.RequiresExactMatch("metadata.name")
	return name, ok && len(content.IsPathSegmentName(name)) == 0
}

// canUseLogEncoding reports whether the log's encoding of an object is the requested encoding. version is the version
// of a custom resource's object.
func (v *view) canUseLogEncoding(version string) bool {
	switch {
	case v.form.Partial: // metadata is the same in every version
		return true
	case v.apiResource.Unstructured:
		return version == v.apiResource.Kind.Version && !v.form.Protobuf
	}
	return v.native
}

// readRows returns the selected objects at the view's revision, which must not be older than resourceVersion.
func (v *view) readRows(ctx context.Context, resourceVersion string) ([]*registryv1.Row, error) {
	if resourceVersion != "" {
		if minRevision, err := strconv.ParseInt(resourceVersion, 10, 64); err != nil || minRevision > v.revision {
			return nil, rpc.ErrDelegate // the delegate returns the API's error
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
