package crd

import (
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	gvschema "k8s.io/apimachinery/pkg/runtime/schema"
)

// schemaCoercer prepares an unstructured object as decoding into a Go type would. It checks the metadata, and drops
// unknown fields and nulls that the schema does not allow.
type schemaCoercer struct {
	*CRD
	// stored is true for objects of etcd. Malformed metadata is then dropped instead of rejected, and an object without
	// a generation gets generation 1.
	stored bool
	// returnUnknownFieldPaths enables the list of unknown fields.
	returnUnknownFieldPaths bool
}

func (s schemaCoercer) coerce(u *unstructured.Unstructured) (unknown []string, err error) {
	kind, hasKind, err := unstructured.NestedString(u.Object, "kind")
	if err != nil {
		return nil, err
	}
	apiVersion, hasVersion, err := unstructured.NestedString(u.Object, "apiVersion")
	if err != nil {
		return nil, err
	}
	m, hasMeta, unknown, err := objectmeta.GetObjectMetaWithOptions(u.Object, objectmeta.ObjectMetaOptions{
		DropMalformedFields:     s.stored,
		ReturnUnknownFieldPaths: s.returnUnknownFieldPaths,
	})
	if err != nil {
		return nil, err
	}
	gv, err := gvschema.ParseGroupVersion(apiVersion)
	if err != nil {
		return nil, err
	}
	if gv.Group == s.Spec.Group && kind == s.Status.AcceptedNames.Kind { // options are decoded here too
		structural, err := s.Structural(gv.Version)
		if err != nil {
			return nil, err
		}
		if !s.Spec.PreserveUnknownFields {
			unknown = append(unknown, pruning.PruneWithOptions(u.Object, structural, true,
				schema.UnknownFieldPathOptions{TrackUnknownFieldPaths: s.returnUnknownFieldPaths})...)
			defaulting.PruneNonNullableNullsWithoutDefaults(u.Object, structural)
		}
		cerr, paths := objectmeta.CoerceWithOptions(nil, u.Object, structural, false, objectmeta.CoerceOptions{
			DropInvalidFields:       s.stored,
			ReturnUnknownFieldPaths: s.returnUnknownFieldPaths,
		})
		if cerr != nil {
			return nil, cerr
		}
		unknown = append(unknown, paths...)
		if s.stored && m.Generation == 0 {
			m.Generation = 1
		}
	}
	if hasKind { // the schema must not drop kind and apiVersion
		u.SetKind(kind)
	}
	if hasVersion {
		u.SetAPIVersion(apiVersion)
	}
	if hasMeta {
		if err := objectmeta.SetObjectMeta(u.Object, m); err != nil {
			return nil, err
		}
	}
	return unknown, nil
}

// schemaCoercingDecoder coerces decoded objects.
type schemaCoercingDecoder struct {
	runtime.Decoder
	coercer schemaCoercer
}

// Decode implements runtime.Decoder.
func (d schemaCoercingDecoder) Decode(
	data []byte,
	defaults *gvschema.GroupVersionKind,
	into runtime.Object,
) (runtime.Object,
	*gvschema.GroupVersionKind, error) {
	obj, gvk, err := d.Decoder.Decode(data, defaults, into)
	var strict []error
	if err != nil {
		strictErr, ok := runtime.AsStrictDecodingError(err)
		if !ok || obj == nil {
			return nil, gvk, err
		}
		strict = strictErr.Errors()
	}
	if u, ok := obj.(*unstructured.Unstructured); ok {
		unknown, err := d.coercer.coerce(u)
		if err != nil {
			return nil, gvk, err
		}
		for _, field := range unknown {
			strict = append(strict, fmt.Errorf("unknown field \"%s\"", field))
		}
	}
	if d.coercer.returnUnknownFieldPaths && len(strict) > 0 {
		return obj, gvk, runtime.NewStrictDecodingError(strict)
	}
	return obj, gvk, nil
}

// schemaCoercingConverter coerces converted objects, because a webhook may return any object.
type schemaCoercingConverter struct {
	runtime.ObjectConvertor
	coercer schemaCoercer
}

// Convert implements runtime.ObjectConvertor.
func (c schemaCoercingConverter) Convert(in, out, context any) error {
	if err := c.ObjectConvertor.Convert(in, out, context); err != nil {
		return err
	}
	if u, ok := out.(*unstructured.Unstructured); ok {
		_, err := c.coercer.coerce(u)
		return err
	}
	return nil
}

// FromStorage converts stored objects to a version in one conversion, so a webhook receives one call. It coerces the
// result.
func (d *CRD) FromStorage(converter runtime.ObjectConvertor, in *unstructured.UnstructuredList,
	gv gvschema.GroupVersion) (*unstructured.UnstructuredList, error) {
	converted, err := converter.ConvertToVersion(in, gv)
	if err != nil {
		return nil, err
	}
	out, ok := converted.(*unstructured.UnstructuredList)
	if !ok || len(out.Items) != len(in.Items) {
		return nil, fmt.Errorf("the conversion of %d objects to %s returned a different list", len(in.Items), gv)
	}
	for i := range out.Items {
		if _, err := (schemaCoercer{CRD: d}).coerce(&out.Items[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// ConvertToVersion implements runtime.ObjectConvertor.
func (c schemaCoercingConverter) ConvertToVersion(
	in runtime.Object,
	gv runtime.GroupVersioner,
) (runtime.Object, error) {
	out, err := c.ObjectConvertor.ConvertToVersion(in, gv)
	if err != nil {
		return nil, err
	}
	if u, ok := out.(*unstructured.Unstructured); ok {
		if _, err := c.coercer.coerce(u); err != nil {
			return nil, err
		}
	}
	return out, nil
}
