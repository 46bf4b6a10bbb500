package audit

import (
	"bytes"
	"encoding/json"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"sigs.k8s.io/yaml"
)

// protobufScheme are the types that protobuf is read into.
var protobufScheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, apiextensionsv1.AddToScheme,
		apiextensionsv1beta1.AddToScheme, apiregistrationv1.AddToScheme, metav1.AddMetaToScheme,
		metav1beta1.AddMetaToScheme} {
		utilruntime.Must(add(s))
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s
}()

// toJSON is an answer's object in JSON. What is in JSON already is not copied.
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
		obj, gvk, err := protobuf.NewSerializer(protobufScheme, protobufScheme).Decode(body, nil, nil)
		if err != nil {
			return nil, err
		}
		obj.GetObjectKind().SetGroupVersionKind(*gvk)
		return json.Marshal(asServed(obj, *gvk))
	}
	return nil, fmt.Errorf("an answer in %q is not recorded", mediaType)
}

// asServed gives an object back what protobuf does not carry: that a list is empty and not null, and of what kind the
// items of a PartialObjectMetadataList are.
func asServed(obj runtime.Object, gvk schema.GroupVersionKind) runtime.Object {
	if list, ok := obj.(*metav1.PartialObjectMetadataList); ok {
		for i := range list.Items {
			list.Items[i].SetGroupVersionKind(gvk.GroupVersion().WithKind("PartialObjectMetadata"))
		}
		return obj
	}
	if meta.IsListType(obj) && meta.LenList(obj) == 0 {
		_ = meta.SetList(obj, []runtime.Object{}) // one that cannot be set stays as it is
	}
	return obj
}

// patchJSON is a patch as an audit event can hold it. Server-side apply takes YAML, and a patch that is refused may be
// anything: an event with either could not be written, nor the batch that it is in. What is no YAML is a string, and so
// is YAML that may have aliases: 100 KB of these are hundreds of megabytes of JSON.
func patchJSON(patch []byte) []byte {
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
