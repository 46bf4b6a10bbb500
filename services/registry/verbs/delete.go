package verbs

import (
	"context"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/apihelpers"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func (c *call) delete(ctx context.Context) (*registryv1.ObjectResponse, error) {
	deleter, ok := c.Storage.(rest.GracefulDeleter)
	if !ok {
		return nil, c.MethodNotSupported("delete")
	}
	if c.req.Name == "" {
		return nil, errEmptyName
	}
	ctx = request.WithNamespace(ctx, c.req.Namespace)
	opts, err := c.deleteOptions(ctx)
	if err != nil {
		return nil, err
	}
	attrs := c.attributes(nil, nil, c.req.Name, admission.Delete, opts, opts.DryRun)
	deleted := true
	result, err := finish(ctx, func() (runtime.Object, error) {
		obj, gone, err := deleter.Delete(ctx, c.req.Name,
			rest.AdmissionToValidateObjectDeleteFunc(c.admit, attrs, c), opts)
		deleted = gone
		return obj, err
	})
	if err != nil {
		return nil, err
	}
	code := http.StatusOK
	// clients still set it, and kube-apiserver still answers 202
	if orphan := opts.OrphanDependents; !deleted && orphan != nil && !*orphan { //nolint:staticcheck
		code = http.StatusAccepted
	}
	if result == nil {
		result = &metav1.Status{
			Status:  metav1.StatusSuccess,
			Code:    int32(code),
			Details: &metav1.StatusDetails{Name: c.req.Name, Kind: c.Kind.Kind},
		}
	}
	return c.answer(ctx, code, result)
}

func (c *call) deleteCollection(ctx context.Context) (*registryv1.ObjectResponse, error) {
	deleter, ok := c.Storage.(rest.CollectionDeleter)
	if !ok {
		return nil, c.MethodNotSupported("deletecollection")
	}
	ctx = request.WithNamespace(ctx, c.req.Namespace)
	listOpts, err := c.listOptions(c.req.Query, "")
	if err != nil {
		return nil, err
	}
	opts, err := c.deleteOptions(ctx)
	if err != nil {
		return nil, err
	}
	attrs := c.attributes(nil, nil, "", admission.Delete, opts, opts.DryRun)
	result, err := finish(ctx, func() (runtime.Object, error) {
		return deleter.DeleteCollection(ctx, rest.AdmissionToValidateObjectDeleteFunc(c.admit, attrs, c),
			opts, listOpts)
	})
	if err != nil {
		return nil, err
	}
	if result == nil {
		result = &metav1.Status{
			Status:  metav1.StatusSuccess,
			Code:    http.StatusOK,
			Details: &metav1.StatusDetails{Kind: c.Kind.Kind},
		}
	}
	return c.answer(ctx, http.StatusOK, result)
}

// deleteOptions come from the body, or else from the query.
func (c *call) deleteOptions(ctx context.Context) (*metav1.DeleteOptions, error) {
	opts := &metav1.DeleteOptions{}
	if len(c.req.Body) > 0 {
		codecs := apihelpers.GetMetaInternalVersionCodecs()
		info, err := negotiation.NegotiateInputSerializerForMediaType(c.req.ContentType, false, codecs)
		if err != nil {
			return nil, err
		}
		kind := metav1.SchemeGroupVersion.WithKind("DeleteOptions")
		obj, gvk, err := codecs.DecoderToVersion(info.Serializer, kind.GroupVersion()).Decode(c.req.Body, &kind, opts)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		if obj != opts {
			return nil, apierrors.NewBadRequest("decoded object cannot be converted to DeleteOptions")
		}
		c.trail.requested(ctx, obj, gvk.GroupVersion(), codecs)
	} else if err := decodeOptions(c.req.Query, opts); err != nil {
		return nil, err
	}
	opts.IgnoreStoreReadErrorWithClusterBreakingPotential = nil // AllowUnsafeMalformedObjectDeletion is alpha and off
	if errs := validation.ValidateDeleteOptions(opts); len(errs) > 0 {
		return nil, invalidOptions("DeleteOptions", errs)
	}
	opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("DeleteOptions"))
	return opts, nil
}
