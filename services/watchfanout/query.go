package watchfanout

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"watershed.dev/platform/frame"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// query is which objects, and in which form.
type query struct {
	entry         *registryv1.ResourceEntry
	output        *registryv1.Output
	namespace     string
	labels        labels.Selector
	fields        fields.Selector
	includeObject string
	// skips: a list leaves out what cannot be read.
	skips bool

	form  frame.Form
	table bool
	// native: the log's encodings are in the version asked for.
	native bool
	as     *commonv1.Kind
	// key tells forms apart, for frames that are made once.
	key formKey
}

type formKey struct {
	resource, version, mediaType, as, asVersion, include, event string
}

func newQuery(p *watchfanoutv1.Query) (*query, error) {
	q := &query{skips: p.GetSkipUnreadable(), entry: p.GetEntry(), output: p.GetOutput(), includeObject: p.GetIncludeObject(), as: p.GetOutput().GetAs()}
	if q.entry.GetStoredAs() == "" {
		return nil, apierrors.NewBadRequest("the resource is not stored")
	}
	if q.entry.Namespaced {
		q.namespace = p.GetNamespace()
	}
	var err error
	if q.labels, err = labels.Parse(p.GetLabelSelector()); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if q.fields, err = fields.ParseSelector(p.GetFieldSelector()); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	switch q.output.GetMediaType() {
	case frame.JSON, frame.Protobuf:
	default:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the watch tier does not write %q", q.output.GetMediaType()))
	}
	switch q.as.GetKind() {
	case "":
	case "Table":
		q.table = true
	case "PartialObjectMetadata", "PartialObjectMetadataList":
	default:
		return nil, apierrors.NewBadRequest("the watch tier does not write " + q.as.Kind)
	}
	k := q.entry.GetKind()
	q.form = frame.FormOf(k, q.as, q.output.MediaType, q.entry.Untyped)
	q.native = proto.Equal(k, q.entry.GetStoredKind()) || q.form.Partial // metadata is the same in every version
	q.key = formKey{resource: q.entry.StoredAs + " " + q.entry.Resource.GetGroup() + " " + q.entry.Resource.GetResource(), version: frame.APIVersion(k), mediaType: q.output.MediaType, as: q.as.GetKind(), asVersion: frame.APIVersion(q.as), include: q.includeObject}
	return q, nil
}

func (q *query) prefix() string {
	if q.namespace == "" {
		return ""
	}
	return q.namespace + "/"
}

// own says whether the item's bytes are what the query asks for, in the version that it asks for.
func (q *query) own(i *cache.Item) bool {
	if q.form.Partial || !q.form.Untyped {
		return q.native
	}
	return i.Version == q.entry.Kind.Version
}

// converts says whether only converting an object can tell if it is selected.
func (q *query) converts() bool {
	return q.entry.ConvertedFields && slices.ContainsFunc(q.fields.Requirements(), func(r fields.Requirement) bool { return !strings.HasPrefix(r.Field, "metadata.") })
}

func (q *query) unselected() bool { return q.labels.Empty() && q.fields.Empty() }

func (q *query) matches(i *cache.Item) bool {
	return (q.labels.Empty() || q.labels.Matches(labels.Set(i.Labels))) && (q.fields.Empty() || q.fields.Matches(fields.Set(i.Fields)))
}

// inScope says whether the object is of the namespace asked for.
func (q *query) inScope(i *cache.Item) bool { return q.namespace == "" || i.Namespace == q.namespace }

// exactName is the one name that the field selector allows.
func (q *query) exactName() (string, bool) {
	if q.entry.Namespaced && q.namespace == "" {
		return "", false
	}
	return q.fields.RequiresExactMatch("metadata.name")
}

// topic is the smallest part of the resource's events, and of its objects, that holds all that the query selects.
func (q *query) topic() cache.Topic {
	if name, ok := q.exactName(); ok {
		return cache.Topic{Field: cache.ByKey, Value: cache.Key(q.namespace, name)}
	}
	for _, r := range q.fields.Requirements() {
		if q.converts() {
			break
		}
		if (r.Operator == selection.Equals || r.Operator == selection.DoubleEquals) && r.Value != "" && !strings.HasPrefix(r.Field, "metadata.") {
			return cache.Topic{Field: r.Field, Value: r.Value}
		}
	}
	if q.namespace != "" {
		return cache.Topic{Field: cache.ByNamespace, Value: q.namespace}
	}
	return cache.Topic{}
}

// listKind is the kind of a list's body.
func (q *query) listKind() (kind, apiVersion string) {
	switch {
	case q.table:
		return "Table", frame.APIVersion(q.as)
	case q.form.Partial:
		return "PartialObjectMetadataList", frame.APIVersion(q.as)
	}
	gv := &commonv1.Kind{Group: q.entry.Resource.Group, Version: q.entry.Resource.Version}
	return q.entry.ListKind, frame.APIVersion(gv)
}

// itemHead is what comes before an item of a list, in place of its opening brace; nil for nothing.
func (q *query) itemHead() []byte {
	if q.table {
		return nil
	}
	return q.form.ItemHead()
}

// withMetadata puts an object's metadata into its row, which registry leaves open: it is cut from the bytes at hand.
func (q *query) withMetadata(row, body []byte) ([]byte, error) {
	const open = `"object":null}`
	head, ok := bytes.CutSuffix(row, []byte(open))
	if !ok {
		return nil, fmt.Errorf("a row does not end with its object: %.80q", row)
	}
	p, err := frame.PartialJSON(frame.APIVersion(q.as), body)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, len(head)+len(p)+len(open))
	out = append(append(out, head...), `"object":`...)
	return append(append(out, p...), '}'), nil
}
