package crd

import (
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured/unstructuredscheme"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/recognizer"
	"k8s.io/apimachinery/pkg/runtime/serializer/versioning"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

var scheme = apiextensionsapiserver.Scheme

// Serializer returns the serializer of requests in a version. Protobuf is for options, statuses and metadata only,
// because custom resources have no protobuf encoding.
func (d *CRD) Serializer(typer runtime.ObjectTyper,
	converter runtime.ObjectConvertor) runtime.NegotiatedSerializer {
	creater := Creater{}
	text := func(o json.SerializerOptions) *json.Serializer {
		return json.NewSerializerWithOptions(json.DefaultMetaFactory, creater, typer, o)
	}
	media := []runtime.SerializerInfo{
		{
			MediaType:        runtime.ContentTypeJSON,
			MediaTypeType:    "application",
			MediaTypeSubType: "json",
			EncodesAsText:    true,
			Serializer:       text(json.SerializerOptions{StreamingCollectionsEncoding: true}),
			PrettySerializer: text(json.SerializerOptions{Pretty: true}),
			StrictSerializer: text(json.SerializerOptions{Strict: true, StreamingCollectionsEncoding: true}),
			StreamSerializer: &runtime.StreamSerializerInfo{EncodesAsText: true,
				Serializer: text(json.SerializerOptions{}), Framer: json.Framer},
		},
		{
			MediaType:        runtime.ContentTypeYAML,
			MediaTypeType:    "application",
			MediaTypeSubType: "yaml",
			EncodesAsText:    true,
			Serializer:       text(json.SerializerOptions{Yaml: true}),
			StrictSerializer: text(json.SerializerOptions{Yaml: true, Strict: true}),
		},
		{
			MediaType:        runtime.ContentTypeProtobuf,
			MediaTypeType:    "application",
			MediaTypeSubType: "vnd.kubernetes.protobuf",
			Serializer: protobuf.NewSerializerWithOptions(creater, typer,
				protobuf.SerializerOptions{StreamingCollectionsEncoding: true}),
			StreamSerializer: &runtime.StreamSerializerInfo{Serializer: protobuf.NewRawSerializer(creater, typer),
				Framer: protobuf.LengthDelimitedFramer},
		},
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		media = append(media, cbor.NewSerializerInfo(creater, typer))
	}
	return serializer{d, converter, media}
}

type serializer struct {
	*CRD
	converter runtime.ObjectConvertor
	media     []runtime.SerializerInfo
}

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (s serializer) SupportedMediaTypes() []runtime.SerializerInfo { return s.media }

// EncoderForVersion implements runtime.NegotiatedSerializer.
func (s serializer) EncoderForVersion(e runtime.Encoder, gv runtime.GroupVersioner) runtime.Encoder {
	return versioning.NewCodec(e, nil, s.converter, scheme, scheme, scheme, gv, nil, "custom resource")
}

// DecoderToVersion implements runtime.NegotiatedSerializer.
func (s serializer) DecoderToVersion(d runtime.Decoder, gv runtime.GroupVersioner) runtime.Decoder {
	strict, ok := d.(*json.Serializer)
	coercing := schemaCoercingDecoder{d, schemaCoercer{CRD: s.CRD, returnUnknownFieldPaths: ok && strict.IsStrict()}}
	return versioning.NewCodec(nil, coercing, runtime.UnsafeObjectConvertor(scheme), scheme, scheme,
		s.Defaulter(scheme), nil, gv, "custom resource")
}

// storedDecoder decodes an object of etcd. The object may be CBOR although the feature gate is off: a server with the
// gate wrote it.
var storedDecoder = recognizer.NewDecoder(storedCBOR, unstructured.UnstructuredJSONScheme)

var storedCBOR = cbor.NewSerializer(unstructuredscheme.NewUnstructuredCreator(),
	unstructuredscheme.NewUnstructuredObjectTyper())

// StorageCodec returns a codec that decodes objects of etcd, in any version, into version, and encodes the storage
// version.
func (d *CRD) StorageCodec(version string, converter runtime.ObjectConvertor) runtime.Codec {
	gv := func(v string) schema.GroupVersion { return schema.GroupVersion{Group: d.Spec.Group, Version: v} }
	var encoder runtime.Encoder = unstructured.UnstructuredJSONScheme
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		encoder = storedCBOR
	}
	return versioning.NewCodec(encoder,
		schemaCoercingDecoder{storedDecoder, schemaCoercer{CRD: d, stored: true}},
		schemaCoercingConverter{converter, schemaCoercer{CRD: d}},
		Creater{}, crdserverscheme.NewUnstructuredObjectTyper(), d.Defaulter(scheme), gv(d.StorageVersion), gv(version),
		"custom resource storage")
}

// Decode decodes an object of etcd in its stored version, coerced and with defaults.
func (d *CRD) Decode(data []byte) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	if _, _, err := storedDecoder.Decode(data, nil, u); err != nil {
		return nil, err
	}
	if _, err := (schemaCoercer{CRD: d, stored: true}).coerce(u); err != nil {
		return nil, err
	}
	d.Defaulter(scheme).Default(u)
	return u, nil
}
