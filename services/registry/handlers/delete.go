package handlers

import (
	"context"
	"errors"
	"net/http"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/apihelpers"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func (w *writeOperation) delete(ctx context.Context) (*registryv1.ObjectResponse, error) {
	deleter, ok := w.Storage.(rest.GracefulDeleter)
	if !ok {
		return nil, w.methodNotSupported("delete")
	}
	if w.req.Name == "" {
		return nil, errEmptyName
	}
	ctx = request.WithNamespace(ctx, w.req.Namespace)
	opts, err := w.deleteOptions(ctx)
	if err != nil {
		return nil, err
	}
	attrs := w.attributes(nil, nil, w.req.Name, admission.Delete, opts, opts.DryRun)
	if ignoresReadErrors(opts) {
		if deleter, err = w.unsafeDeleter(ctx, attrs); err != nil {
			return nil, err
		}
	}
	deleted := true
	result, err := finish(ctx, func() (runtime.Object, error) {
		obj, wasDeleted, err := deleter.Delete(ctx, w.req.Name,
			rest.AdmissionToValidateObjectDeleteFunc(w.admit, attrs, w), opts)
		deleted = wasDeleted
		return obj, err
	})
	if err != nil {
		return nil, err
	}
	code := http.StatusOK
	// clients still set OrphanDependents, and kube-apiserver still responds with 202
	if orphan := opts.OrphanDependents; !deleted && orphan != nil && !*orphan { //nolint:staticcheck
		code = http.StatusAccepted
	}
	if result == nil {
		result = &metav1.Status{
			Status:  metav1.StatusSuccess,
			Code:    int32(code),
			Details: &metav1.StatusDetails{Name: w.req.Name, Kind: w.Kind.Kind},
		}
	}
	return w.encodeResult(ctx, code, result)
}

func (w *writeOperation) deleteCollection(ctx context.Context) (*registryv1.ObjectResponse, error) {
	deleter, ok := w.Storage.(rest.CollectionDeleter)
	if !ok {
		return nil, w.methodNotSupported("deletecollection")
	}
	ctx = request.WithNamespace(ctx, w.req.Namespace)
	listOpts, err := w.listOptions(w.req.Query, "")
	if err != nil {
		return nil, err
	}
	opts, err := w.deleteOptions(ctx)
	if err != nil {
		return nil, err
	}
	if ignoresReadErrors(opts) {
		return nil, errUnsafeCollection()
	}
	attrs := w.attributes(nil, nil, "", admission.Delete, opts, opts.DryRun)
	release, err := deletions.acquire(ctx, deletionOwner(w.user))
	defer release()
	if errors.Is(err, errBusy) {
		return nil, apierrors.NewTooManyRequests(
			"too many collections of the user are being deleted, please try again later", 1)
	}
	result, err := finish(ctx, func() (runtime.Object, error) {
		if err != nil {
			return nil, err
		}
		return DeleteInPages(ctx, deleter, rest.AdmissionToValidateObjectDeleteFunc(w.admit, attrs, w), opts, listOpts)
	})
	if err != nil {
		return nil, err
	}
	if result == nil {
		result = &metav1.Status{
			Status:  metav1.StatusSuccess,
			Code:    http.StatusOK,
			Details: &metav1.StatusDetails{Kind: w.Kind.Kind},
		}
	}
	// The objects are deleted. If the gateway cannot receive them, the list has no items.
	var resp *registryv1.ObjectResponse
	fits := w.omitsObjects() || w.jsonFits(result)
	if fits {
		if resp, err = w.encodeResult(ctx, http.StatusOK, result); err != nil {
			return nil, err
		}
		fits = len(resp.Body) <= maxResultBytes
	}
	if !fits {
		if err := meta.SetList(result, nil); err != nil {
			return nil, err
		}
		return w.encodeResult(ctx, http.StatusOK, result)
	}
	return resp, nil
}

// omitsObjects reports whether the response has the metadata or the rows of objects only.
func (w *writeOperation) omitsObjects() bool {
	query, _ := url.ParseQuery(w.req.Query)
	return w.req.Output.GetAs() != nil && query.Get("includeObject") != string(metav1.IncludeObject)
}

// jsonFits reports whether a list takes at most maxResultBytes as JSON. Upstream encodes such a list object by object,
// and other forms as a whole.
func (w *writeOperation) jsonFits(obj runtime.Object) bool {
	info, ok := runtime.SerializerInfoForMediaType(w.Serializer.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok || !meta.IsListType(obj) {
		return true
	}
	encoder := w.Serializer.EncoderForVersion(info.Serializer, w.Kind.GroupVersion())
	return !errors.Is(encoder.Encode(obj, &boundedWriter{maxResultBytes}), errLong)
}

// boundedWriter discards all bytes. It returns errLong after so many of them.
type boundedWriter struct{ left int }

var errLong = errors.New("the result is too long")

// Write implements io.Writer.
func (w *boundedWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, errLong
	}
	return len(p), nil
}

// deletions bounds the collections that a user deletes at once in this process: each holds its decoded objects, also
// for a dry run.
var deletions = ownerSlots{perOwner: maxOwnDeletions, maxWaiting: maxWaitingDeletions}

// deletionOwner returns the owner whose collections are counted. The namespace controller's user has no bound.
func deletionOwner(u user.Info) string {
	if u.GetName() == user.KubeControllerManager {
		return ""
	}
	return identity.QuotaOwner(u, "")
}

const (
	// maxOwnDeletions and maxWaitingDeletions are the bounds of deletions. Each that waits keeps its seat.
	maxOwnDeletions     = 2
	maxWaitingDeletions = 14
	// maxResultBytes bounds the list of the objects that deletecollection has deleted. Beside it, a message has the
	// audit context.
	maxResultBytes = rpc.MaxMessageBytes / 2
)

// deleteOptions decodes the options from the body. If the body is empty, it decodes them from the query.
func (w *writeOperation) deleteOptions(ctx context.Context) (*metav1.DeleteOptions, error) {
	opts := &metav1.DeleteOptions{}
	if len(w.req.Body) > 0 {
		codecs := apihelpers.GetMetaInternalVersionCodecs()
		info, err := negotiation.NegotiateInputSerializerForMediaType(w.req.ContentType, false, codecs)
		if err != nil {
			return nil, err
		}
		kind := metav1.SchemeGroupVersion.WithKind("DeleteOptions")
		obj, gvk, err := codecs.DecoderToVersion(info.Serializer, kind.GroupVersion()).Decode(w.req.Body, &kind, opts)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if obj != opts {
			return nil, apierrors.NewBadRequest("decoded object cannot be converted to DeleteOptions")
		}
		w.auditContext.recordRequest(ctx, obj, gvk.GroupVersion(), codecs)
	} else if err := decodeOptions(w.req.Query, opts); err != nil {
		return nil, err
	}
	dropIgnoreReadErrors(opts)
	if errs := validation.ValidateDeleteOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("DeleteOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("DeleteOptions"))
	return opts, nil
}
