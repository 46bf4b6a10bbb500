package routing

import (
	"errors"
	"net/url"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/identity"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// plan says who answers a list or a watch. It is made once, before anybody is asked. Who answers a GET planGet says;
// what writes or connects is registry's.
type plan struct {
	// source answers query; where query is nil, registry answers the request itself, from etcd.
	source *Source
	query  *watchfanoutv1.Query
	opts   *internalversion.ListOptions
	// isInternal: authn, authz or admission asks, which nobody else than from may answer, and which measure by bookmarks
	// how fresh they are.
	isInternal bool
}

// plan decides who answers a list or a watch; the error refuses it, in kube-apiserver's words
// (k8s.io/apiserver/pkg/endpoints/handlers/get.go, ListResource).
func (c *requestContext) plan() (*plan, error) {
	opts, err := listOptions(c.req.URL)
	if err != nil {
		return nil, err
	}
	p := &plan{opts: opts, isInternal: c.isInternal()}
	if !c.sourceCanServe() {
		return p, nil
	}
	selector, supported, err := c.fieldSelector(opts.FieldSelector)
	if err != nil {
		return nil, err
	}
	if !supported { // the words are those of the resource's own field label conversion
		return p, nil
	}
	q := &watchfanoutv1.Query{
		Resource:       c.apiResource.Resource,
		CrdRevision:    c.apiResource.CrdRevision,
		Digest:         c.apiResource.Digest,
		Namespace:      c.namespace(),
		FieldSelector:  selector.String(),
		Output:         c.out,
		SkipUnreadable: c.skipUnreadable(),
	}
	if opts.LabelSelector != nil {
		q.LabelSelector = opts.LabelSelector.String()
	}
	if c.out.GetAs().GetKind() == "Table" {
		q.IncludeObject = c.req.URL.Query().Get("includeObject")
		switch metav1.IncludeObjectPolicy(q.IncludeObject) {
		case "", metav1.IncludeNone, metav1.IncludeMetadata, metav1.IncludeObject:
		default:
			return p, nil
		}
	}
	p.query, p.source = q, c.source()
	return p, nil
}

// planGet is what the watch tier is asked for one object; nil where registry answers.
func (c *requestContext) planGet() *watchfanoutv1.GetRequest {
	if c.router.TierGets == nil || c.isInternal() || c.apiResource.StorageResource == "" ||
		c.apiResource.Resource.Subresource != "" ||
		!c.hasVerb("watch") {
		return nil
	}
	if c.out.As != nil || c.out.Pretty || !sourceMediaType(c.out.MediaType) {
		return nil
	}
	r := &watchfanoutv1.GetRequest{
		Query: &watchfanoutv1.Query{
			Resource:    c.apiResource.Resource,
			CrdRevision: c.apiResource.CrdRevision,
			Digest:      c.apiResource.Digest,
			Namespace:   c.namespace(),
			Output:      c.out,
		},
		Name: c.info.Name,
	}
	switch c.req.URL.RawQuery {
	case "":
	case "resourceVersion=0":
		r.ResourceVersion = "0"
	default:
		return nil
	}
	return r
}

// listOptions reads a list's or watch's options.
func listOptions(u *url.URL) (*internalversion.ListOptions, error) {
	opts := &internalversion.ListOptions{}
	if u.RawQuery != "" {
		if err := metainternalversionscheme.ParameterCodec.DecodeParameters(u.Query(),
			metav1.SchemeGroupVersion, opts); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	internalversion.SetListOptionsDefaults(opts, true)
	if errs := metainternalversionvalidation.ValidateListOptions(opts, true); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	return opts, nil
}

// sourceCanServe says whether the answer is made of the bytes that a source holds.
func (c *requestContext) sourceCanServe() bool {
	if c.apiResource.StorageResource == "" || c.apiResource.Resource.Subresource != "" ||
		len(content.IsPathSegmentName(c.namespace())) > 0 {
		return false
	}
	return c.info.Verb == "watch" || sourceMediaType(c.out.MediaType) && !c.out.Pretty &&
		c.out.GetAs().GetKind() != "PartialObjectMetadata"
}

// sourceMediaType says whether a media type is one that sources write.
func sourceMediaType(mediaType string) bool {
	return mediaType == runtime.ContentTypeJSON || mediaType == runtime.ContentTypeProtobuf
}

var errUnknownField = errors.New("a field that the catalog does not know")

// fieldSelector is the request's selector in stored fields, with the name that the path has. known is false where it
// names a field that the catalog does not know.
func (c *requestContext) fieldSelector(
	requested fields.Selector,
) (selector fields.Selector, supported bool, err error) {
	selector = fields.Everything()
	if requested != nil {
		selector, err = requested.Transform(func(label, value string) (string, string, error) {
			to, ok := c.apiResource.SelectableFields[label]
			if !ok {
				return "", "", errUnknownField
			}
			return to, value, nil
		})
		if errors.Is(err, errUnknownField) {
			return nil, false, nil
		}
		if err != nil {
			return nil, false, apierrors.NewBadRequest(err.Error())
		}
	}
	if c.info.Name == "" {
		return selector, true, nil
	}
	if selector.Empty() {
		return fields.OneTermEqualSelector("metadata.name", c.info.Name), true, nil
	}
	if name, ok := selector.RequiresExactMatch("metadata.name"); !ok || name != c.info.Name {
		return nil, false, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
	}
	return selector, true, nil
}

// source is what answers the request's lists and fills its watches.
func (c *requestContext) source() *Source {
	if c.isInternal() {
		return &c.router.Internal
	}
	return &c.router.Tier
}

// isInternal says whether the caller is authn, authz or admission, who decide by what they read. Registry answers them, so
// that a replica of the watch tier can neither forge a permission nor keep one that was taken away.
func (c *requestContext) isInternal() bool {
	return slices.Contains(c.user.GetGroups(), identity.ServicesGroup)
}

// skipUnreadable says whether unreadable objects are left out of a list: for authn, authz and admission, to whom an unreadable
// role grants nothing. Not for admissionregistration.k8s.io: a policy that is missing would let through what it
// refuses, so that list is refused.
func (c *requestContext) skipUnreadable() bool {
	return c.apiResource.Resource.GetGroup() != "admissionregistration.k8s.io" && c.isInternal()
}
