package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"sync"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"sigs.k8s.io/yaml"
)

// protobufScheme returns the types that protobuf is decoded into. They take 0.9 MB, so the first call builds them.
var protobufScheme = sync.OnceValue(func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, apiextensionsv1.AddToScheme,
		apiextensionsv1beta1.AddToScheme, apiregistrationv1.AddToScheme, metav1.AddMetaToScheme,
		metav1beta1.AddMetaToScheme} {
		utilruntime.Must(add(s))
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s
})

// toJSON returns a response's object in JSON. It does not copy a body that is JSON already.
func toJSON(mediaType string, body []byte) ([]byte, error) {
	switch mediaTypeOf(mediaType) {
	case runtime.ContentTypeJSON:
		return body, nil
	case runtime.ContentTypeYAML:
		return yaml.YAMLToJSON(body)
	case runtime.ContentTypeCBOR:
		var v any
		if err := direct.Unmarshal(body, &v); err != nil {
			return nil, err
		}
		return json.Marshal(v)
	case runtime.ContentTypeProtobuf:
		obj, err := DecodeProtobuf(body)
		if err != nil {
			return nil, err
		}
		return json.Marshal(obj)
	}
	return nil, fmt.Errorf("audit: unsupported media type %q", mediaType)
}

// DecodeProtobuf decodes an object of a response, with the kinds and the empty lists that protobuf does not encode.
func DecodeProtobuf(data []byte) (runtime.Object, error) {
	obj, gvk, err := protobuf.NewSerializer(protobufScheme(), protobufScheme()).Decode(data, nil, nil)
	if err != nil {
		return nil, err
	}
	obj.GetObjectKind().SetGroupVersionKind(*gvk)
	return asServed(obj, *gvk), nil
}

// asServed restores two facts that protobuf does not encode. An empty list is not null, and the items of a
// PartialObjectMetadataList have a kind.
func asServed(obj runtime.Object, gvk schema.GroupVersionKind) runtime.Object {
	if list, ok := obj.(*metav1.PartialObjectMetadataList); ok {
		for i := range list.Items {
			list.Items[i].SetGroupVersionKind(gvk.GroupVersion().WithKind("PartialObjectMetadata"))
		}
		return obj
	}
	if meta.IsListType(obj) && meta.LenList(obj) == 0 {
		_ = meta.SetList(obj, []runtime.Object{}) // a list without a settable Items field stays unchanged
	}
	return obj
}

// patchJSON returns a patch in the form that an audit event can contain. Server-side apply accepts YAML, and a rejected
// patch may have any content. Neither would be valid in an event, and would fail the event's whole batch. A patch that
// is not YAML becomes a string. YAML that may contain aliases does too, because 100 KB of aliases expand to hundreds of
// megabytes of JSON. CBOR is decoded only as CBOR, because the same bytes can be another document in
// YAML.
func patchJSON(mediaType string, patch []byte) []byte {
	if mediaTypeOf(mediaType) == string(types.ApplyCBORPatchType) {
		if data, err := toJSON(runtime.ContentTypeCBOR, patch); err == nil {
			return data
		}
		return mustMarshal(string(patch))
	}
	if json.Valid(patch) {
		return patch
	}
	if !bytes.ContainsAny(patch, "&*") {
		if data, err := yaml.YAMLToJSONStrict(patch); err == nil {
			return data
		}
	}
	return mustMarshal(string(patch))
}
