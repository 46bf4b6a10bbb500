package handlers

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// maxMergeComparisons bounds the comparisons of the elements of lists that are merged. So many take some 10 s. A merge
// that takes longer than a write would occupy a processor after its response.
const maxMergeComparisons = 250_000_000

// strategicMerge merges as strategicpatch.StrategicMergeMapPatch does, until ctx ends. Upstream merges a list in
// quadratic time, and kube-apiserver continues after its 504 response. A list whose merge has begun is merged to its
// end, so strategicMerge rejects a patch whose longest list is too long.
func strategicMerge(
	ctx context.Context,
	original, patch map[string]any,
	dataStruct runtime.Object,
) (map[string]any, error) {
	if p, o := longestList(patch), longestList(original); p*(p+o) > maxMergeComparisons {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf(
			"a list of %d elements is too long for a strategic merge patch with a list of %d elements", o, p))
	}
	schema, err := strategicpatch.NewPatchMetaFromStruct(dataStruct)
	if err != nil {
		return nil, err
	}
	return strategicpatch.StrategicMergeMapPatchUsingLookupPatchMeta(original, patch, cancelablePatchMeta{schema, ctx})
}

// longestList returns the length of the longest list of a decoded JSON value.
func longestList(v any) (longest int) {
	switch v := v.(type) {
	case map[string]any:
		for _, field := range v {
			longest = max(longest, longestList(field))
		}
	case []any:
		longest = len(v)
		for _, element := range v {
			longest = max(longest, longestList(element))
		}
	}
	return longest
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
