package conversion

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json" // decodes whole numbers as int64

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
)

// EncodeUnstructured encodes custom resources. It converts all objects together if a stored version differs, so that a
// webhook is called once.
func EncodeUnstructured(ctx context.Context, scope *handlers.RequestScope,
	r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	list := &unstructured.UnstructuredList{Items: make([]unstructured.Unstructured, len(r.Json))}
	list.SetGroupVersionKind(schema.GroupVersionKind{
		Group:   scope.Kind.Group,
		Version: scope.Kind.Version,
		Kind:    scope.APIResource.ListKind,
	})
	other := false
	for i, data := range r.Json {
		u := &list.Items[i]
		if err := json.Unmarshal(data, &u.Object); err != nil {
			return nil, fmt.Errorf("decode %s: %w", r.StorageResource, err)
		}
		version := scope.Kind.Version
		if i < len(r.Versions) && r.Versions[i] != "" {
			version = r.Versions[i]
		}
		other = other || version != scope.Kind.Version
		u.SetGroupVersionKind(schema.GroupVersionKind{Group: scope.Kind.Group, Version: version, Kind: scope.Kind.Kind})
	}
	if other {
		var err error
		if list, err = scope.FromStorage(list); err != nil {
			return nil, err
		}
	}
	objects := make([]runtime.Object, len(list.Items))
	for i := range list.Items {
		objects[i] = &list.Items[i]
	}
	resp := &registryv1.EncodeResponse{}
	if r.GetOutput().GetAs().GetKind() == "Table" {
		var err error
		if resp, err = encodeRows(ctx, scope, scope.HubGroupVersion(), objects, r); err != nil {
			return nil, err
		}
	} else {
		for i := range list.Items {
			data, err := storage.UnstructuredJSON(&list.Items[i])
			if err != nil {
				return nil, err
			}
			resp.Objects = append(resp.Objects, data)
		}
	}
	if !scope.APIResource.GetConvertedFields() {
		return resp, nil
	}
	for _, obj := range objects {
		f, err := scope.SelectableFields(obj)
		if err != nil {
			return nil, err
		}
		resp.Fields = append(resp.Fields, &registryv1.Fields{Fields: f})
	}
	return resp, nil
}
