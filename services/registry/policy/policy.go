// Package policy answers authn, authz and admission, who decide by what they read: lists from etcd, and events from the
// tail of the log that registry itself reads.
package policy

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
	"watershed.dev/services/registry/resources"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/tail"
)

// Policy answers them.
type Policy struct {
	watchfanoutv1.UnimplementedInternalWatchServer
	resources *resources.Resources
	source    *source.Source
	tail      *tail.Tail
	draining  chan struct{}
	drainOnce sync.Once
	// lists are the turns of lists: each is a whole resource in memory.
	lists chan struct{}
}

// policyLists is how many lists are read at a time.
const policyLists = 4

// New returns a policy of what is served, whose events t has.
func New(r *resources.Resources, s *source.Source, t *tail.Tail) *Policy {
	return &Policy{
		resources: r,
		source:    s,
		tail:      t,
		draining:  make(chan struct{}),
		lists:     make(chan struct{}, policyLists),
	}
}

// Drain ends every watch, so that the gateways resume them on another registry.
func (p *Policy) Drain() { p.drainOnce.Do(func() { close(p.draining) }) }

// ofOne says whether a query is of one object.
func (p *Policy) ofOne(ctx context.Context, q *watchfanoutv1.Query) (bool, error) {
	if _, named := exactName(q.GetFieldSelector()); !named {
		return false, nil
	}
	e, err := p.resources.Endpoint(ctx, q.GetResource())
	if err != nil {
		return false, err
	}
	return !e.Entry.GetNamespaced() || q.GetNamespace() != "", nil
}

// List answers a whole list as it is in etcd.
func (p *Policy) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	limited := r.Limit != 0 && r.ResourceVersion != "0" // with "0" a limit does not count
	if limited || r.Continue != "" || r.ResourceVersionMatch == "Exact" {
		return rpc.ErrDelegate
	}
	ctx := stream.Context()
	// A list of one object waits for no other: how fresh policy is is asked by one.
	one, err := p.ofOne(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	if !one {
		select {
		case p.lists <- struct{}{}:
			defer func() { <-p.lists }()
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
	v, err := p.view(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	rows, err := v.rows(ctx, r.ResourceVersion)
	if err != nil {
		return rpc.ToStatus(err)
	}
	items := make([][]byte, len(rows))
	for i, row := range rows {
		if !v.own(row.Version) {
			return rpc.ErrDelegate
		}
		if items[i], err = v.form.Item(row.Json, row.Protobuf); err != nil {
			return rpc.ToStatus(err)
		}
	}
	gv := &commonv1.Kind{Group: v.entry.Resource.Group, Version: v.entry.Resource.Version}
	list := &frame.List{
		Kind:         v.entry.ListKind,
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
	policy  *Policy
	entry   *registryv1.APIResource
	output  *registryv1.Output
	form    frame.Encoding
	stored  *storage.Stored
	selects tail.Selector
	// revision was etcd's before the definition was read that objects are read by: a later one is told of after it.
	revision int64
	// prefix is where in etcd all that is selected lies.
	prefix string
	// skips: what cannot be read is left out in place of the whole being refused.
	skips bool
	// native: the log's encodings are in the version asked for.
	native bool
}

func (p *Policy) view(ctx context.Context, q *watchfanoutv1.Query) (*view, error) {
	revision, err := p.source.ReadRevision(ctx)
	if err != nil {
		return nil, err
	}
	e, err := p.resources.Endpoint(ctx, q.GetResource())
	if err != nil {
		return nil, err
	}
	entry, as := e.Entry, q.GetOutput().GetAs()
	if entry.GetStorageResource() == "" || !offered(q.GetOutput()) || q.GetNamespace() != "" && !entry.Namespaced {
		return nil, rpc.ErrDelegate
	}
	v := &view{
		policy:   p,
		revision: revision,
		entry:    entry,
		output:   q.GetOutput(),
		skips:    q.GetSkipUnreadable(),
	}
	v.form = frame.EncodingOf(entry.Kind, as, q.GetOutput().GetMediaType(), entry.Unstructured)
	k, stored := entry.Kind, entry.StoredKind
	v.native = k.Group == stored.Group && k.Version == stored.Version && k.Kind == stored.Kind
	if v.stored, err = p.resources.Stored(ctx, entry.StorageResource); err != nil {
		return nil, err
	}
	v.prefix = v.stored.Prefix
	namespace := ""
	if entry.Namespaced && q.GetNamespace() != "" {
		namespace = q.GetNamespace()
		v.prefix += namespace + "/"
	}
	if name, ok := exactName(q.GetFieldSelector()); ok && (namespace != "" || !entry.Namespaced) {
		v.prefix += name // and what else begins so, which is not selected
	}
	if entry.ConvertedFields && convertedField(q.GetFieldSelector()) {
		return nil, rpc.ErrDelegate
	}
	v.selects, err = tail.NewSelector(namespace, q.GetLabelSelector(), q.GetFieldSelector())
	return v, err
}

// offered says whether objects are written in a form.
func offered(o *registryv1.Output) bool {
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

// own says whether the log's encodings of an object are what is asked for. version is the one that an object of a
// custom resource is in.
func (v *view) own(version string) bool {
	switch {
	case v.form.Partial: // metadata is the same in every version
		return true
	case v.entry.Unstructured:
		return version == v.entry.Kind.Version && !v.form.Protobuf
	}
	return v.native
}

// rows are the objects that are selected, as etcd had them at the view's revision, which is not to be
// older than resourceVersion.
func (v *view) rows(ctx context.Context, resourceVersion string) ([]*registryv1.Row, error) {
	if resourceVersion != "" {
		if least, err := strconv.ParseInt(resourceVersion, 10, 64); err != nil || least > v.revision {
			return nil, rpc.ErrDelegate // which knows in which words that is refused
		}
	}
	var out []*registryv1.Row
	err := v.policy.source.Pages(ctx, v.prefix, v.revision, func(kvs []*mvccpb.KeyValue) error {
		for _, row := range source.RowsOf(ctx, v.stored, kvs) {
			switch {
			case row.Unreadable == "":
				if v.selects(row.Namespace, &logv1.Object{Labels: row.Labels, Fields: row.Fields}) {
					out = append(out, row)
				}
			case !v.skips:
				return apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s",
					row.Namespace+"/"+row.Name, row.Unreadable))
			}
		}
		return nil
	})
	return out, err
}
