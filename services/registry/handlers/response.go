package handlers

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/util/apihelpers"

	"watershed.dev/platform/telemetry"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// outputKind returns the kind that out converts to, or nil.
func outputKind(out *registryv1.Output) *schema.GroupVersionKind {
	if out.GetAs() == nil {
		return nil
	}
	return &schema.GroupVersionKind{Group: out.As.Group, Version: out.As.Version, Kind: out.As.Kind}
}

// encodeResponse encodes obj in out's media type and kind.
func (scope *RequestScope) encodeResponse(ctx context.Context, out *registryv1.Output, query string, code int,
	obj runtime.Object) (*registryv1.ObjectResponse, error) {
	body, err := scope.Encode(ctx, out, query, obj)
	if err != nil {
		return nil, err
	}
	return &registryv1.ObjectResponse{Code: int32(code), Body: body}, nil
}

// Encode converts obj to a Table, partial metadata or the served version, and encodes it in out's media type.
func (scope *RequestScope) Encode(ctx context.Context, out *registryv1.Output, query string,
	obj runtime.Object) ([]byte, error) {
	ctx, span := telemetry.StartSpan(ctx, "SerializeObject")
	defer span.End()
	as := outputKind(out)
	tableOptions, err := tableOptions(as, query)
	if err != nil {
		return nil, err
	}
	if meta.IsListType(obj) && meta.LenList(obj) == 0 { // an empty list is [], not null
		if err := meta.SetList(obj, []runtime.Object{}); err != nil {
			return nil, err
		}
	}
	obj, err = scope.transform(ctx, obj, tableOptions, as)
	if err != nil {
		return nil, err
	}
	serializer, gv := scope.Serializer, scope.Kind.GroupVersion()
	if as != nil {
		serializer, gv = apihelpers.GetMetaInternalVersionCodecs(), as.GroupVersion()
	}
	info, ok := runtime.SerializerInfoForMediaType(serializer.SupportedMediaTypes(), out.GetMediaType())
	if !ok {
		accepted, _ := negotiation.MediaTypesForSerializer(serializer)
		return nil, negotiation.NewNotAcceptableError(accepted)
	}
	s := info.Serializer
	if out.GetPretty() && info.PrettySerializer != nil {
		s = info.PrettySerializer
	}
	buf := &cancelableBuffer{ctx: ctx, list: meta.IsListType(obj)}
	// As in kube-apiserver (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters), the order of a map's keys in CBOR
	// is random, so that no client relies on it.
	encoder := serializer.EncoderForVersion(runtime.UseNondeterministicEncoding(s), gv)
	if err := encoder.Encode(obj, buf); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// cancelableBuffer is a buffer of an encoder. A list's buffer fails once ctx has ended, because upstream's encoders
// write a list object by object. A single object can be the result of a write, so its buffer does not fail.
type cancelableBuffer struct {
	bytes.Buffer
	ctx  context.Context
	list bool
}

// Write implements io.Writer.
func (w *cancelableBuffer) Write(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil && w.list {
		return 0, err
	}
	return w.Buffer.Write(p)
}

func tableOptions(as *schema.GroupVersionKind, query string) (*metav1.TableOptions, error) {
	if as == nil || as.Kind != "Table" {
		return nil, nil
	}
	opts := &metav1.TableOptions{}
	values, _ := url.ParseQuery(query)
	if err := metainternalversionscheme.ParameterCodec.DecodeParameters(values,
		metav1.SchemeGroupVersion, opts); err != nil {
		return nil, err
	}
	switch errs := validation.ValidateTableOptions(opts); len(errs) {
	case 0:
		return opts, nil
	case 1:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("Unable to convert to Table as requested: %v", errs[0].Error()))
	default:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("Unable to convert to Table as requested: %v", errs))
	}
}

func (scope *RequestScope) transform(ctx context.Context, obj runtime.Object, opts *metav1.TableOptions,
	as *schema.GroupVersionKind) (runtime.Object, error) {
	if _, ok := obj.(*metav1.Status); ok || as == nil {
		return obj, nil
	}
	switch as.Kind {
	case "PartialObjectMetadata":
		if meta.IsListType(obj) {
			return nil, notAcceptable(fmt.Sprintf("you requested PartialObjectMetadata, but the requested object is "+
				"a list (%T)", obj))
		}
		return partial(obj, as.GroupVersion())
	case "PartialObjectMetadataList":
		return partialList(obj, as.GroupVersion())
	case "Table":
		return scope.table(ctx, obj, opts, as.GroupVersion())
	}
	accepted, _ := negotiation.MediaTypesForSerializer(apihelpers.GetMetaInternalVersionCodecs())
	return nil, negotiation.NewNotAcceptableError(accepted)
}

func notAcceptable(message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusNotAcceptable,
		Reason:  "NotAcceptable",
		Message: message,
	}}
}

func partial(obj runtime.Object, gv schema.GroupVersion) (*metav1.PartialObjectMetadata, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	p := meta.AsPartialObjectMetadata(m)
	p.GetObjectKind().SetGroupVersionKind(gv.WithKind("PartialObjectMetadata"))
	return p, nil
}

func partialList(obj runtime.Object, gv schema.GroupVersion) (runtime.Object, error) {
	li, ok := obj.(metav1.ListInterface)
	if !ok {
		return nil, notAcceptable(fmt.Sprintf("you requested PartialObjectMetadataList, but the requested object is "+
			"not a list (%T)", obj))
	}
	list := &metav1.PartialObjectMetadataList{} // kube-apiserver encodes no items as null
	err := meta.EachListItem(obj, func(item runtime.Object) error {
		p, err := partial(item, gv)
		if err == nil {
			list.Items = append(list.Items, *p)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	list.ResourceVersion, list.Continue = li.GetResourceVersion(), li.GetContinue()
	list.RemainingItemCount = li.GetRemainingItemCount()
	if gv == metav1beta1.SchemeGroupVersion {
		return &metav1beta1.PartialObjectMetadataList{ListMeta: list.ListMeta, Items: list.Items}, nil
	}
	return list, nil
}

// table converts obj, an object or a list, to a Table with the storage's columns.
func (scope *RequestScope) table(ctx context.Context, obj runtime.Object, opts *metav1.TableOptions,
	gv schema.GroupVersion) (runtime.Object, error) {
	convertor := scope.TableConvertor()
	if convertor == nil {
		return nil, notAcceptable("no Table exists for " + scope.Resource.Resource)
	}
	t, err := convertor.ConvertToTable(ctx, obj, opts)
	if err != nil {
		return nil, err
	}
	for i := range t.Rows {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		row := &t.Rows[i]
		switch opts.IncludeObject {
		case metav1.IncludeObject:
			if row.Object.Object, err = scope.Convertor.ConvertToVersion(row.Object.Object,
				scope.Kind.GroupVersion()); err != nil {
				return nil, err
			}
		case metav1.IncludeMetadata, "":
			if row.Object.Object, err = partial(row.Object.Object, gv); err != nil {
				return nil, err
			}
		case metav1.IncludeNone:
			row.Object.Object = nil
		default:
			return nil, apierrors.NewBadRequest(fmt.Sprintf("unrecognized includeObject value: %q", opts.IncludeObject))
		}
	}
	return t, nil
}
