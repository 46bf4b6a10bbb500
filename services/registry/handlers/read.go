package handlers

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/rest"
	apistorage "k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/telemetry"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/storage"
)

// Get returns an object in the encoding that r.Output requires.
func (scope *RequestScope) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	if r.Name == "" {
		return nil, errEmptyName
	}
	ctx, span := telemetry.StartSpan(request.WithNamespace(ctx, r.Namespace), "Get")
	defer span.End()
	getter, ok := scope.Storage.(rest.Getter)
	if !ok { // Connect serves a GetterWithOptions
		return nil, scope.methodNotSupported("get")
	}
	opts, err := getOptions(r.Query)
	if err != nil {
		return nil, err
	}
	// kube-apiserver's watch cache responds 500 to an invalid resourceVersion. It has no Events and ComponentStatuses.
	if scope.APIResource.GetStorageResource() != "events" && scope.Resource.Resource != "componentstatuses" {
		if _, err := (apistorage.APIObjectVersioner{}).ParseResourceVersion(opts.ResourceVersion); err != nil {
			return nil, err
		}
	}
	cacheable, protobuf := scope.cacheable(r, opts)
	if cacheable {
		if body := scope.ResponseCache.Get(ctx, r.Namespace, r.Name, protobuf); body != nil {
			return &registryv1.ObjectResponse{Code: http.StatusOK, Body: body}, nil
		}
	}
	var obj runtime.Object
	read := func() error { obj, err = getter.Get(ctx, r.Name, opts); return err }
	if err := waitUntilFresh(ctx, read, func() error { return nil }); err != nil {
		return nil, err
	}
	resp, err := scope.encodeResponse(ctx, r.Output, r.Query, http.StatusOK, obj)
	if err == nil && cacheable {
		scope.cacheResponse(r, obj, protobuf, resp.Body)
	}
	return resp, err
}

// cacheable reports whether ResponseCache can serve a request: it must be for the current object, as JSON or protobuf.
// protobuf is the encoding.
func (scope *RequestScope) cacheable(r *registryv1.GetRequest, opts *metav1.GetOptions) (ok, protobuf bool) {
	if scope.ResponseCache == nil || scope.Namespaced != (r.Namespace != "") || r.Output.GetAs() != nil ||
		r.Output.GetPretty() || opts.ResourceVersion != "" && opts.ResourceVersion != "0" {
		return false, false
	}
	mediaType := r.Output.GetMediaType()
	return mediaType == runtime.ContentTypeJSON || mediaType == runtime.ContentTypeProtobuf,
		mediaType == runtime.ContentTypeProtobuf
}

// cacheResponse caches a response's body under the revision of its object.
func (scope *RequestScope) cacheResponse(r *registryv1.GetRequest, obj runtime.Object, protobuf bool, body []byte) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	if revision, err := storage.Revision(m); err == nil {
		scope.ResponseCache.Put(r.Namespace, r.Name, protobuf, int64(revision), body)
	}
}

func getOptions(query string) (*metav1.GetOptions, error) {
	opts := &metav1.GetOptions{}
	if query == "" {
		return opts, nil
	}
	values, _ := url.ParseQuery(query)
	if export := values["export"]; len(export) > 0 {
		on := true
		if err := runtime.Convert_Slice_string_To_bool(&export, &on, nil); err != nil {
			return nil, apierrors.NewBadRequest("the export parameter cannot be parsed: " + err.Error())
		}
		if on {
			return nil, apierrors.NewBadRequest("the export parameter, deprecated since v1.14, is no longer supported")
		}
	}
	return opts, decodeOptions(query, opts)
}

// List returns a list, read from etcd. It also returns kube-apiserver's errors for invalid options.
func (scope *RequestScope) List(ctx context.Context, r *registryv1.GetRequest) ([]byte, error) {
	lister, ok := scope.Storage.(rest.Lister)
	if !ok {
		return nil, scope.methodNotSupported("list")
	}
	opts, err := scope.listOptions(r.Query, r.Name)
	if err != nil {
		return nil, err
	}
	ctx, span := telemetry.StartSpan(request.WithNamespace(ctx, r.Namespace), "List")
	defer span.End()
	var list runtime.Object
	read := func() error { list, err = lister.List(ctx, opts); return err }
	if opts.Continue == "" {
		// A list reads all objects before it compares revisions, so that the wait must not repeat it.
		probe := &internalversion.ListOptions{
			ResourceVersion:      opts.ResourceVersion,
			ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
			Limit:                1,
		}
		err = waitUntilFresh(ctx, read, func() error { _, err := lister.List(ctx, probe); return err })
	} else if err = read(); apistorage.IsTooLargeResourceVersion(err) {
		err = withRetryAfter(err)
	}
	if err != nil {
		return nil, err
	}
	return scope.Encode(ctx, r.Output, r.Query, list)
}

const (
	// freshnessTimeout bounds the wait for a revision that has not arrived yet, as in kube-apiserver's cache
	// (k8s.io/apiserver/pkg/storage/cacher, blockTimeout).
	freshnessTimeout = 3 * time.Second
	freshnessPoll    = 50 * time.Millisecond
)

// waitUntilFresh repeats a read of a revision that has not arrived yet, for at most freshnessTimeout. It repeats the
// read once probe, a cheaper read, finds the revision.
func waitUntilFresh(ctx context.Context, read, probe func() error) error {
	deadline := time.Now().Add(freshnessTimeout)
	err := read()
	for apistorage.IsTooLargeResourceVersion(err) {
		if time.Now().After(deadline) {
			return withRetryAfter(err)
		}
		if err := lifecycle.Sleep(ctx, freshnessPoll); err != nil {
			return err
		}
		if err = probe(); err == nil {
			err = read()
		}
	}
	return err
}

// withRetryAfter makes clients retry after 1 s.
func withRetryAfter(err error) error {
	var api *apierrors.StatusError
	if errors.As(err, &api) && api.ErrStatus.Details != nil {
		api.ErrStatus.Details.RetryAfterSeconds = 1
	}
	return err
}

func (scope *RequestScope) listOptions(query, name string) (*internalversion.ListOptions, error) {
	opts := &internalversion.ListOptions{}
	if err := decodeOptions(query, opts); err != nil {
		return nil, err
	}
	watchList := utilfeature.DefaultFeatureGate.Enabled(features.WatchList)
	internalversion.SetListOptionsDefaults(opts, watchList)
	if errs := metainternalversionvalidation.ValidateListOptions(opts, watchList); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	var err error
	if opts.FieldSelector != nil {
		opts.FieldSelector, err = opts.FieldSelector.Transform(func(label, value string) (string, string, error) {
			return scope.Convertor.ConvertFieldLabel(scope.Kind, label, value)
		})
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	if name != "" {
		if opts.FieldSelector != nil && !opts.FieldSelector.Empty() {
			if selected, ok := opts.FieldSelector.RequiresExactMatch("metadata.name"); !ok || name != selected {
				return nil, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
			}
		} else {
			opts.FieldSelector = fields.OneTermEqualSelector("metadata.name", name)
		}
	}
	// kube-apiserver's watch cache ignores limit for resourceVersion "0"; it does not cache events
	// (k8s.io/apiserver/pkg/storage/cacher, computeListLimit).
	if opts.ResourceVersion == "0" && scope.APIResource.GetStorageResource() != "events" {
		opts.Limit = 0
	}
	return opts, nil
}
