package routing

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/sharding"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/identity"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// plan is the source of a list or a watch. It is computed once, before any call.
// Writes and connections always go to registry.
type plan struct {
	// source serves query. If query is nil, registry serves the request from etcd.
	source *Source
	query  *watchfanoutv1.Query
	opts   *internalversion.ListOptions
	// isInternal is set for authn, authz and admission. Only source may serve them, and they use bookmarks to measure
	// how current they are.
	isInternal bool
}

// plan returns the source of a list or a watch. An error rejects the request with kube-apiserver's text
// (k8s.io/apiserver/pkg/endpoints/handlers/get.go, ListResource).
func (c *requestContext) plan() (*plan, error) {
	opts, err := listOptions(c.req.URL)
	if err != nil {
		return nil, err
	}
	if err := checkSelectors(opts); err != nil {
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
	if !supported { // the resource's field label conversion has the error text
		return p, nil
	}
	q := &watchfanoutv1.Query{
		Resource:       c.apiResource.Resource,
		CrdRevision:    c.apiResource.CrdRevision,
		Digest:         c.apiResource.Digest,
		Namespace:      c.namespace(),
		FieldSelector:  selector.String(),
		Output:         c.sourceOutput(),
		SkipUnreadable: c.skipUnreadable(),
	}
	if opts.LabelSelector != nil {
		q.LabelSelector = opts.LabelSelector.String()
	}
	if q.Shard, err = shardOf(opts.ShardSelector); err != nil {
		return nil, err
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

// maxSelectorTerms bounds the terms of a request's selectors: requirements, and the further values of each. Each is
// compared with every event of a watch, also with events that are not selected, and a watch keeps about 60 bytes for
// each in two processes. kube-apiserver has no such bound: a selector of 1 MB has 340,000 requirements.
const maxSelectorTerms = 10_000

// checkSelectors returns an error if a selector has more than maxSelectorTerms.
func checkSelectors(opts *internalversion.ListOptions) error {
	terms := 0
	if opts.LabelSelector != nil {
		requirements, _ := opts.LabelSelector.Requirements()
		for _, r := range requirements {
			terms += max(1, len(r.ValuesUnsorted()))
		}
	}
	if opts.FieldSelector != nil {
		terms += len(opts.FieldSelector.Requirements())
	}
	if terms > maxSelectorTerms {
		return apierrors.NewBadRequest(fmt.Sprintf("the selectors have %d requirements or values: at most %d are allowed",
			terms, maxSelectorTerms))
	}
	return nil
}

// shardOf parses a shard selector. It ignores the selector unless the feature gate is on. Its error is kube-apiserver's
// (k8s.io/apiserver/pkg/registry/generic/registry, Store.ListPredicate): a response with the code 500.
func shardOf(selector string) (*watchfanoutv1.Shard, error) {
	if selector == "" || !utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		return nil, nil
	}
	parsed, err := sharding.Parse(selector)
	if err != nil {
		return nil, fmt.Errorf("invalid shard selector: %w", err)
	}
	s := &watchfanoutv1.Shard{Selector: parsed.String()}
	for _, r := range parsed.Requirements() { // the parser has checked that all have the same field, and start < end
		s.Field = r.Key
		first, _ := strconv.ParseUint(r.Start, 0, 64)
		end, err := strconv.ParseUint(r.End, 0, 64)
		if err != nil { // 2^64
			end = 0
		}
		s.Ranges = append(s.Ranges, &watchfanoutv1.HashRange{First: first, Last: end - 1})
	}
	return s, nil
}

// listOptions decodes and validates the options of a list or a watch.
func listOptions(u *url.URL) (*internalversion.ListOptions, error) {
	opts := &internalversion.ListOptions{}
	if u.RawQuery != "" {
		if err := metainternalversionscheme.ParameterCodec.DecodeParameters(u.Query(),
			metav1.SchemeGroupVersion, opts); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	watchList := utilfeature.DefaultFeatureGate.Enabled(features.WatchList)
	internalversion.SetListOptionsDefaults(opts, watchList)
	if errs := metainternalversionvalidation.ValidateListOptions(opts, watchList); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	return opts, nil
}

// sourceCanServe reports whether the response consists of bytes that a source holds.
func (c *requestContext) sourceCanServe() bool {
	if c.apiResource.StorageResource == "" || c.apiResource.Resource.Subresource != "" ||
		len(content.IsPathSegmentName(c.namespace())) > 0 {
		return false
	}
	return c.info.Verb == "watch" || sourceMediaType(c.out.MediaType) && !c.out.Pretty &&
		c.out.GetAs().GetKind() != "PartialObjectMetadata"
}

// sourceMediaType reports whether sources encode a media type.
func sourceMediaType(mediaType string) bool {
	return mediaType == runtime.ContentTypeJSON || mediaType == runtime.ContentTypeProtobuf
}

var errUnknownField = errors.New("field label not in the discovery view")

// fieldSelector returns the request's selector over stored fields, plus the name in the path. supported is false if the
// selector has a field that the discovery view does not contain.
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

// source returns the source of the request's lists and watches.
func (c *requestContext) source() *Source {
	if c.isInternal() {
		return &c.router.Internal
	}
	return &c.router.Tier
}

// isInternal reports whether the client is authn, authz or admission. These services base decisions on their reads, so
// registry serves them. A replica of the watch tier then cannot forge a permission or keep a revoked permission.
func (c *requestContext) isInternal() bool {
	return slices.Contains(c.user.GetGroups(), identity.ServicesGroup)
}

// skipUnreadable reports whether a list omits unreadable objects. This is so for authn, authz and admission, because an
// unreadable role grants nothing. It is not so for admissionregistration.k8s.io: a missing policy would admit requests
// that it rejects, so the list fails.
func (c *requestContext) skipUnreadable() bool {
	return c.apiResource.Resource.GetGroup() != "admissionregistration.k8s.io" && c.isInternal()
}
