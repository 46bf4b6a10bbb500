// Package form has what a list or a watch asks for: which objects, and in which form. It makes bytes of bytes; nothing
// in it waits for anybody.
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
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// Query is which objects, and in which form. It does not change.
type Query struct {
	Entry         *registryv1.APIResource
	Output        *registryv1.Output
	Namespace     string
	Labels        labels.Selector
	Fields        fields.Selector
	IncludeObject string
	// SkipUnreadable: a list leaves out what cannot be read.
	SkipUnreadable bool

	Encoding frame.Encoding
	// Table: rows of a Table, of the kind As.
	Table bool
	As    *commonv1.Kind
	// EncodingKey tells forms apart, for what is made once for all who ask in the same.
	EncodingKey EncodingKey
	// native: the log's encodings are in the version asked for.
	native bool
}

// EncodingKey is a form, and with Event what is made of an event in it.
type EncodingKey struct {
	resource, version, mediaType, as, asVersion, include string
	Event                                                string
}

// ForFields is the key of what objects' fields are in the query's version, whatever form they are asked for in.
func (k EncodingKey) ForFields(event string) EncodingKey {
	return EncodingKey{resource: k.resource, version: k.version, Event: event}
}

// ErrNotDiscovered is what asks for a resource that the catalog has not come to, as the caller knows it.
var ErrNotDiscovered = errors.New("the catalog has not come to what is asked for")

// Resolve reads what a caller asks for, by a view of the catalog that is nil before the first; an error is ErrNotDiscovered
// or the API's own.
func Resolve(v *discovery.View, p *watchfanoutv1.Query) (*Query, error) {
	if v == nil {
		return nil, ErrNotDiscovered
	}
	r := p.GetResource()
	e, ok := v.APIResource(r.GetGroup(), r.GetVersion(), r.GetResource(), r.GetSubresource())
	switch {
	case !ok, e.CrdRevision < p.GetCrdRevision() && e.Digest != p.GetDigest():
		return nil, ErrNotDiscovered
	case p.GetNamespace() != "" && !e.Namespaced: // it was defined anew, and the caller's permission is for a namespace
		return nil, ErrNotDiscovered
	}
	return New(e, p)
}

// New reads what a caller asks for of a resource; an error is rpc.ErrAskRegistry or the API's own.
func New(e *registryv1.APIResource, p *watchfanoutv1.Query) (*Query, error) {
	q := &Query{
		SkipUnreadable: p.GetSkipUnreadable(),
		Entry:          e,
		Output:         p.GetOutput(),
		IncludeObject:  p.GetIncludeObject(),
		As:             p.GetOutput().GetAs(),
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
	switch q.Output.GetMediaType() {
	case frame.JSON, frame.Protobuf:
	default:
		return nil, rpc.ErrDelegate // which writes every form
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
	q.native = proto.Equal(k, q.Entry.GetStoredKind()) || q.Encoding.Partial // metadata is the same in every version
	q.EncodingKey = EncodingKey{
		resource: q.Entry.StorageResource + " " + q.Entry.Resource.GetGroup() + " " + q.Entry.Resource.GetResource(),
		version:  frame.APIVersion(k),
		// a key is kept longer than what it is a part of, which may be a header of a megabyte
		mediaType: strings.Clone(q.Output.MediaType),
		as:        strings.Clone(q.As.GetKind()),
		asVersion: strings.Clone(frame.APIVersion(q.As)),
		include:   strings.Clone(q.IncludeObject),
	}
	return q, nil
}

// Prefix is how the keys of the namespace's objects begin.
func (q *Query) Prefix() string {
	if q.Namespace == "" {
		return ""
	}
	return q.Namespace + "/"
}

// IsNative says whether the item's bytes are what the query asks for, in the version that it asks for.
func (q *Query) IsNative(i *cache.Item) bool {
	if q.Encoding.Partial || !q.Encoding.Unstructured {
		return q.native
	}
	return i.Version == q.Entry.Kind.Version
}

// NeedsConvertedFields says whether only converting an object can tell if it is selected.
func (q *Query) NeedsConvertedFields() bool {
	return q.Entry.ConvertedFields && slices.ContainsFunc(q.Fields.Requirements(), func(r fields.Requirement) bool {
		return !strings.HasPrefix(r.Field, "metadata.")
	})
}

// SelectsEverything says whether every object of the namespace is asked for.
func (q *Query) SelectsEverything() bool { return q.Labels.Empty() && q.Fields.Empty() }

// Matches says whether the selectors select an object, by its stored fields.
func (q *Query) Matches(i *cache.Item) bool {
	return (q.Labels.Empty() || q.Labels.Matches(labels.Set(i.Labels))) &&
		(q.Fields.Empty() || q.Fields.Matches(fields.Set(i.Fields)))
}

// InNamespace says whether the object is of the namespace asked for.
func (q *Query) InNamespace(i *cache.Item) bool {
	return q.Namespace == "" || i.Namespace == q.Namespace
}

// ExactName is the one name that the field selector allows.
func (q *Query) ExactName() (string, bool) {
	if q.Entry.Namespaced && q.Namespace == "" {
		return "", false
	}
	return q.Fields.RequiresExactMatch("metadata.name")
}

// Trigger is the smallest part of the resource's events, and of its objects, that holds all that the query selects.
func (q *Query) Trigger() cache.Trigger {
	if name, ok := q.ExactName(); ok {
		return cache.Trigger{Field: cache.ByKey, Value: cache.Key(q.Namespace, name)}
	}
	for _, r := range q.Fields.Requirements() {
		if q.NeedsConvertedFields() {
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

// ListKind is the kind of a list's body.
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

// RowsHaveMetadata says whether a Table's rows include objects' metadata, which registry leaves for the tier to put in.
func (q *Query) RowsHaveMetadata() bool {
	return q.IncludeObject != string(metav1.IncludeObject) && q.IncludeObject != string(metav1.IncludeNone)
}

// RowHead is a row as registry makes it, up to the opening brace of its object's metadata; or all of it, where it has
// none.
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

// RowTail is what comes after a row's metadata.
func (q *Query) RowTail() []byte {
	if !q.RowsHaveMetadata() {
		return nil
	}
	return []byte("}}")
}

// MayMatch is Matches, but where only converting an object can tell.
func (q *Query) MayMatch(i *cache.Item) bool {
	if !q.NeedsConvertedFields() || q.IsNative(i) {
		return q.Matches(i)
	}
	return q.Labels.Empty() || q.Labels.Matches(labels.Set(i.Labels))
}

// Describe names what is selected, for people.
func (q *Query) Describe() string {
	var parts []string
	for _, p := range [][2]string{
		{"namespace", q.Namespace},
		{"labels", q.Labels.String()},
		{"fields", q.Fields.String()},
		{"as", q.As.GetKind()},
		{"version", frame.APIVersion(q.Entry.Kind)},
	} {
		if p[1] != "" {
			parts = append(parts, p[0]+"="+p[1])
		}
	}
	return strings.Join(parts, " ")
}

// noColumns stand for columns that the client has been told of.
var noColumns = []byte("null")

// Row is an event whose object is a Table of one row. columns is nil where the client has been told of them.
func (q *Query) Row(event string, revision int64, row, columns []byte) []byte {
	if columns == nil {
		columns = noColumns
	}
	table := fmt.Appendf(nil, `{"kind":"Table","apiVersion":%q,"metadata":{"resourceVersion":"%d"},`+
		`"columnDefinitions":%s,"rows":[%s]}`, frame.APIVersion(q.As), revision, columns, row)
	return frame.WatchJSON(event, table)
}

// Bookmark says that everything up to a revision has been sent, or with initialEnd all initial events.
func (q *Query) Bookmark(revision int64, initialEnd bool) []byte {
	if !q.Table {
		return q.Encoding.Bookmark(revision, initialEnd)
	}
	object := frame.Object(nil, "PartialObjectMetadata", frame.APIVersion(q.As),
		frame.BookmarkJSON(revision, initialEnd))
	return q.Row("BOOKMARK", revision, fmt.Appendf(nil, `{"cells":[],"object":%s}`, object), nil)
}
