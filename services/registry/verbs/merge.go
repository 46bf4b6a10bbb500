package verbs

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// strategicMerge is strategicpatch.StrategicMergeMapPatch until ctx ends. Upstream merges a list by key in quadratic
// time, and kube-apiserver goes on after it has answered 504. One list is merged to its end.
func strategicMerge(ctx context.Context, original, patch map[string]any, of runtime.Object) (map[string]any, error) {
	schema, err := strategicpatch.NewPatchMetaFromStruct(of)
	if err != nil {
		return nil, err
	}
	return strategicpatch.StrategicMergeMapPatchUsingLookupPatchMeta(original, patch, wantedMeta{schema, ctx})
}

// wantedMeta answers how fields are merged for as long as ctx lasts: a merge asks it of each field of each element.
type wantedMeta struct {
	strategicpatch.LookupPatchMeta
	ctx context.Context
}

// LookupPatchMetadataForStruct implements strategicpatch.LookupPatchMeta.
func (m wantedMeta) LookupPatchMetadataForStruct(key string) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta,
	error) {
	return m.bound(m.LookupPatchMeta.LookupPatchMetadataForStruct(key))
}

// LookupPatchMetadataForSlice implements strategicpatch.LookupPatchMeta.
func (m wantedMeta) LookupPatchMetadataForSlice(key string) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta,
	error) {
	return m.bound(m.LookupPatchMeta.LookupPatchMetadataForSlice(key))
}

func (m wantedMeta) bound(of strategicpatch.LookupPatchMeta, meta strategicpatch.PatchMeta,
	err error) (strategicpatch.LookupPatchMeta, strategicpatch.PatchMeta, error) {
	if err == nil {
		err = m.ctx.Err()
	}
	if err != nil {
		return nil, meta, err
	}
	return wantedMeta{of, m.ctx}, meta, nil
}
