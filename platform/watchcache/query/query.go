// Package query resolves the query of a list or a watch: the objects that it selects, and their encoding. It computes
// bytes from bytes, and never waits. It has no goroutines.
package query

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Query is a resolved query. It does not change.
type Query struct {
	Entry         *registryv1.APIResource
	Output        *registryv1.Output
	Namespace     string
	Labels        labels.Selector
	Fields        fields.Selector
	IncludeObject string
	// Shard selects by the hash of a field; nil for all objects.
	Shard *watchfanoutv1.Shard
	// SkipUnreadable makes a list omit unreadable objects.
	SkipUnreadable bool

	Encoding frame.Encoding
	// Table requests rows of a Table, whose kind is As.
	Table bool
	As    *commonv1.Kind
	// EncodingKey identifies the query's encoding, so that clients with the same encoding share its results.
	EncodingKey EncodingKey
	// native means that the log's encodings are in the requested version.
	native bool
}

// EncodingKey identifies an encoding and, with Event set, one frame of an event in it.
type EncodingKey struct {
	resource, version, mediaType, as, asVersion, include string
	Event                                                string
}

// ForFields returns the key of objects' fields in the query's version. It is the same for every encoding.
func (k EncodingKey) ForFields(event string) EncodingKey {
	return EncodingKey{resource: k.resource, version: k.version, Event: event}
}

// ErrNotDiscovered means that the replica's discovery does not have the resource as the caller has it.
var ErrNotDiscovered = errors.New("the resource is not in this replica's discovery yet")

// Resolve resolves a caller's query with a view of discovery; the view is nil before the first response. The error is
// ErrNotDiscovered, rpc.ErrDelegate or an API error.
func Resolve(v *discovery.View, p *watchfanoutv1.Query) (*Query, error) {
	if v == nil {
		return nil, ErrNotDiscovered
	}
	r := p.GetResource()
	e, ok := v.APIResource(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())
	switch {
	case !ok, e.CrdRevision < p.GetCrdRevision() && e.Digest != p.GetDigest():
		return nil, ErrNotDiscovered
	// the CRD was recreated, and the caller's permission is for a namespace
	case p.GetNamespace() != "" && !e.Namespaced:
		return nil, ErrNotDiscovered
	}
	return New(e, p)
}

// New resolves a query of the resource e. The error is rpc.ErrDelegate or an API error.
func New(e *registryv1.APIResource, p *watchfanoutv1.Query) (*Query, error) {
	q := &Query{
		SkipUnreadable: p.GetSkipUnreadable(),
		Entry:          e,
		Output:         p.GetOutput(),
		IncludeObject:  p.GetIncludeObject(),
		As:             p.GetOutput().GetAs(),
		Shard:          p.GetShard(),
	}
	if q.Entry.GetStorageResource() == "" {
		return nil, rpc.ErrDelegate
	}
	if q.Entry.Namespaced {
		q.Namespace = p.GetNamespace()
	}
	var err error
	if q.Labels, err = labels.Parse(p.GetLabelSelector()); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if q.Fields, err = fields.ParseSelector(p.GetFieldSelector()); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	switch q.Shard.GetField() {
	case "", uidField, namespaceField:
	default:
		return nil, rpc.ErrDelegate
	}
	switch q.Output.GetMediaType() {
	case frame.JSON, frame.Protobuf:
	default:
		return nil, rpc.ErrDelegate // registry writes every encoding
	}
	switch q.As.GetKind() {
	case "":
	case "Table":
		q.Table = true
	case "PartialObjectMetadata", "PartialObjectMetadataList":
	default:
		return nil, rpc.ErrDelegate
	}
	k := q.Entry.GetKind()
	q.Encoding = frame.EncodingOf(k, q.As, q.Output.MediaType, q.Entry.Unstructured)
	if q.Entry.StorageResource == daemonSets {
		q.Encoding.OmitAnnotation = templateGeneration
	}
	// Metadata is the same in every version.
	q.native = proto.Equal(k, q.Entry.GetStoredKind()) || q.Encoding.Partial
	q.EncodingKey = EncodingKey{
		resource: q.Entry.StorageResource + " " + q.Entry.Resource.GetGroup() + " " + q.Entry.Resource.GetResource(),
		version:  frame.APIVersion(k),
		// The key outlives the request. Clones do not keep the request's headers alive, which may have a megabyte.
		mediaType: strings.Clone(q.Output.MediaType),
		as:        strings.Clone(q.As.GetKind()),
		asVersion: strings.Clone(frame.APIVersion(q.As)),
		include:   strings.Clone(q.IncludeObject),
	}
	return q, nil
}

// The conversion of a DaemonSet to apps/v1 adds an annotation (k8s.io/kubernetes/pkg/apis/apps/v1,
// Convert_apps_DaemonSet_To_v1_DaemonSet). kube-apiserver takes metadata from the object before the conversion.
const (
	daemonSets         = "daemonsets.apps"
	templateGeneration = "deprecated.daemonset.template.generation"
)

// ThroughMetadata returns an item's JSON up to the end of its metadata, as the metadata of lists and of Table rows.
func (q *Query) ThroughMetadata(i *cache.Item) ([]byte, error) {
	through, err := i.ThroughMetadata()
	if err != nil || q.Encoding.OmitAnnotation == "" {
		return through, err
	}
	return frame.OmitAnnotation(through, q.Encoding.OmitAnnotation)
}

// Stored returns an item's own bytes in q's media type: the argument of q.Encoding's methods for a native item.
func (q *Query) Stored(i *cache.Item) []byte {
	if q.Encoding.Protobuf {
		return i.Protobuf()
	}
	return i.JSON()
}

// Prefix returns the prefix of the keys of the query's namespace; empty for all namespaces.
func (q *Query) Prefix() string {
	if q.Namespace == "" {
		return ""
	}
	return q.Namespace + "/"
}

// IsNative reports whether the item's bytes are in the requested version.
func (q *Query) IsNative(i *cache.Item) bool {
	if q.Encoding.Partial || !q.Encoding.Unstructured {
		return q.native
	}
	return i.Version == q.Entry.Kind.Version
}

// NeedsConvertedFields reports whether only the converted object has the fields of the field selector. Metadata of a
// custom resource is native in every version, but its fields are not.
func (q *Query) NeedsConvertedFields(i *cache.Item) bool {
	return q.SelectsConvertedFields() && i.Version != q.Entry.Kind.Version
}

// SelectsConvertedFields reports whether the field selector needs the fields of converted objects.
func (q *Query) SelectsConvertedFields() bool {
	return q.Entry.ConvertedFields && slices.ContainsFunc(q.Fields.Requirements(), func(r fields.Requirement) bool {
		return !strings.HasPrefix(r.Field, "metadata.")
	})
}

// CountsRemaining reports whether a page has a remainingItemCount: it has no selector of labels or fields. As in
// kube-apiserver, the count of a shard's page includes the objects of other shards.
func (q *Query) CountsRemaining() bool { return q.Labels.Empty() && q.Fields.Empty() }

// Matches reports whether the selectors match an object's shard and its stored labels and fields.
func (q *Query) Matches(i *cache.Item) bool {
	return q.inShard(i) && (q.Labels.Empty() || q.Labels.Matches(labels.Set(i.Labels))) &&
		(q.Fields.Empty() || q.Fields.Matches(i.Fields()))
}

// InNamespace reports whether the object is in the query's namespace.
func (q *Query) InNamespace(i *cache.Item) bool {
	return q.Namespace == "" || i.Namespace == q.Namespace
}

// ExactName returns the only name that the field selector allows, if there is one.
func (q *Query) ExactName() (string, bool) {
	if q.Entry.Namespaced && q.Namespace == "" {
		return "", false
	}
	return q.Fields.RequiresExactMatch("metadata.name")
}

// Trigger returns the smallest trigger that includes everything that the query selects.
func (q *Query) Trigger() cache.Trigger {
	if name, ok := q.ExactName(); ok {
		return cache.Trigger{Field: cache.ByKey, Value: cache.Key(q.Namespace, name)}
	}
	for _, r := range q.Fields.Requirements() {
		if q.SelectsConvertedFields() {
			break
		}
		if (r.Operator == selection.Equals || r.Operator == selection.DoubleEquals) && r.Value != "" &&
			!strings.HasPrefix(r.Field, "metadata.") {
			return cache.Trigger{Field: r.Field, Value: r.Value}
		}
	}
	if q.Namespace != "" {
		return cache.Trigger{Field: cache.ByNamespace, Value: q.Namespace}
	}
	return cache.Trigger{}
}

// ListKind returns the kind and apiVersion of a list's body.
func (q *Query) ListKind() (kind, apiVersion string) {
	switch {
	case q.Table:
		return "Table", frame.APIVersion(q.As)
	case q.Encoding.Partial:
		return "PartialObjectMetadataList", frame.APIVersion(q.As)
	}
	gv := &commonv1.Kind{Group: q.Entry.Resource.Group, Version: q.Entry.Resource.Version}
	return q.Entry.ListKind, frame.APIVersion(gv)
}

// RowsHaveMetadata reports whether a Table's rows include objects' metadata. registry omits it, and the replica inserts
// it.
func (q *Query) RowsHaveMetadata() bool {
	return q.IncludeObject != string(metav1.IncludeObject) && q.IncludeObject != string(metav1.IncludeNone)
}

// RowHead returns registry's row up to the opening brace of its object's metadata, or the whole row if it has no
// metadata.
func (q *Query) RowHead(row []byte) ([]byte, error) {
	if !q.RowsHaveMetadata() {
		return row, nil
	}
	const object, null = `"object":`, `null}`
	head, ok := bytes.CutSuffix(row, []byte(object+null))
	if !ok {
		return nil, fmt.Errorf("a row does not end with its object: %.80q", row)
	}
	return append(row[:len(head)+len(object):len(head)+len(object)], frame.PartialHead(frame.APIVersion(q.As))...), nil
}

// RowTail returns the bytes after a row's metadata.
func (q *Query) RowTail() []byte {
	if !q.RowsHaveMetadata() {
		return nil
	}
	return []byte("}}")
}

// MayMatch is Matches, but returns true if only a conversion can decide.
func (q *Query) MayMatch(i *cache.Item) bool {
	if !q.NeedsConvertedFields(i) {
		return q.Matches(i)
	}
	return q.inShard(i) && (q.Labels.Empty() || q.Labels.Matches(labels.Set(i.Labels)))
}

// ShardInfo returns the selector of a list's shardInfo, or an empty string. In kube-apiserver, Tables, lists of
// metadata and lists of custom resources have no shardInfo.
func (q *Query) ShardInfo() string {
	if q.Table || q.Encoding.Partial || q.Encoding.Unstructured {
		return ""
	}
	return q.Shard.GetSelector()
}

// Describe describes the query, for the status page.
func (q *Query) Describe() string {
	var parts []string
	for _, p := range [][2]string{
		{"namespace", q.Namespace},
		{"labels", q.Labels.String()},
		{"fields", q.Fields.String()},
		{"as", q.As.GetKind()},
		{"version", frame.APIVersion(q.Entry.Kind)},
		{"shard", q.Shard.GetSelector()},
	} {
		if p[1] != "" {
			parts = append(parts, p[0]+"="+p[1])
		}
	}
	return strings.Join(parts, " ")
}

// jsonNull replaces columns that the client already has, and the object of a row without an object.
var jsonNull = []byte("null")

// Row returns an event whose object is a Table of one row. columns is nil if the client already has them.
func (q *Query) Row(event string, revision int64, row, columns []byte) []byte {
	if columns == nil {
		columns = jsonNull
	}
	table := fmt.Appendf(nil, `{"kind":"Table","apiVersion":%q,"metadata":{"resourceVersion":"%d"},`+
		`"columnDefinitions":%s,"rows":[%s]}`, frame.APIVersion(q.As), revision, columns, row)
	return frame.WatchJSON(event, table)
}

// Bookmark returns a bookmark: every event up to revision has been sent. With initialEnd, it marks the end of the
// initial events.
func (q *Query) Bookmark(revision int64, initialEnd bool) []byte {
	if !q.Table {
		return q.Encoding.Bookmark(revision, initialEnd)
	}
	// The row's object is as in asTable (k8s.io/apiserver/pkg/endpoints/handlers/response.go).
	kind, version := "PartialObjectMetadata", frame.APIVersion(q.As)
	if q.IncludeObject == string(metav1.IncludeObject) {
		kind, version = q.Entry.Kind.GetKind(), frame.APIVersion(q.Entry.Kind)
	}
	object := jsonNull
	if q.IncludeObject != string(metav1.IncludeNone) || initialEnd {
		object = frame.Object(kind, version, frame.BookmarkJSON(revision, initialEnd))
	}
	return q.Row("BOOKMARK", revision, fmt.Appendf(nil, `{"cells":[],"object":%s}`, object), nil)
}
