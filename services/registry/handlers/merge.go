package handlers

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// strategicMerge merges as strategicpatch.StrategicMergeMapPatch does, until ctx ends. Upstream merges a list by key in
// quadratic time, and kube-apiserver continues after its 504 response. A list whose merge has begun is merged to its
// end.
func strategicMerge(
	ctx context.Context,
	original, patch map[string]any,
	dataStruct runtime.Object,
) (map[string]any, error) {
	schema, err := strategicpatch.NewPatchMetaFromStruct(dataStruct)
	if err != nil {
		return nil, err
	}
	return strategicpatch.StrategicMergeMapPatchUsingLookupPatchMeta(original, patch, cancelablePatchMeta{schema, ctx})
}

// cancelablePatchMeta returns the merge rules of fields until ctx ends. A merge looks up each field of each element.
type cancelablePatchMeta struct {
	strategicpatch.LookupPatchMeta
	ctx context.Context
}

// LookupPatchMetadataForStruct implements strategicpatch.LookupPatchMeta.
func (m cancelablePatchMeta) LookupPatchMetadataForStruct(
	key string,
) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta,
	error) {
	return m.wrap(m.LookupPatchMeta.LookupPatchMetadataForStruct(key))
}

// LookupPatchMetadataForSlice implements strategicpatch.LookupPatchMeta.
func (m cancelablePatchMeta) LookupPatchMetadataForSlice(
	key string,
) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta,
	error) {
	return m.wrap(m.LookupPatchMeta.LookupPatchMetadataForSlice(key))
}

func (m cancelablePatchMeta) wrap(next strategicpatch.LookupPatchMeta, meta strategicpatch.PatchMeta,
	err error) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta, error) {
	if err == nil {
		err = m.ctx.Err()
	}
	if err != nil {
		return nil, meta, err
	}
	return cancelablePatchMeta{next, m.ctx}, meta, nil
}
