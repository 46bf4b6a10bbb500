package handlers

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// maxMergeComparisons bounds mergeComparisons. So many take some 3 to 6 s. The timeout of a write does not stop the
// merge of a list.
const maxMergeComparisons = 100_000_000

// strategicMerge merges as strategicpatch.StrategicMergeMapPatch does, until ctx ends. Upstream merges a list in
// quadratic time, and kube-apiserver continues after its 504 response. A list whose merge has begun is merged to its
// end, so strategicMerge rejects a patch with lists that are too long.
func strategicMerge(
	ctx context.Context,
	original, patch map[string]any,
	dataStruct runtime.Object,
) (map[string]any, error) {
	schema, err := strategicpatch.NewPatchMetaFromStruct(dataStruct)
	if err != nil {
		return nil, err
	}
	if n := mergeComparisons(original, patch, schema); n > maxMergeComparisons {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf(
			"the lists are too long for a strategic merge patch: %d comparisons of elements, and the limit is %d", n,
			maxMergeComparisons))
	}
	return strategicpatch.StrategicMergeMapPatchUsingLookupPatchMeta(original, patch, cancelablePatchMeta{schema, ctx})
}

// mergeComparisons returns about how many comparisons of elements a strategic merge takes. A list whose elements are
// merged takes the square of its elements, also if the patch has a single element.
func mergeComparisons(original, patch map[string]any, schema strategicpatch.LookupPatchMeta) (n int) {
	for key, p := range patch {
		key = strings.TrimPrefix(key, "$deleteFromPrimitiveList/")
		key, isOrder := strings.CutPrefix(key, "$setElementOrder/")
		switch p := p.(type) {
		case map[string]any:
			if o, ok := original[key].(map[string]any); ok {
				if fields, _, err := schema.LookupPatchMetadataForStruct(key); err == nil {
					n += mergeComparisons(o, p, fields)
				}
			}
		case []any:
			o, ok := original[key].([]any)
			elements, rules, err := schema.LookupPatchMetadataForSlice(key)
			if !ok && !isOrder || err != nil || !slices.Contains(rules.GetPatchStrategies(), "merge") {
				continue // the patch replaces the list, or has an error that the merge reports
			}
			length := len(o) + len(p)
			if unordered, ok := patch[key].([]any); ok && isOrder {
				length += len(unordered)
			}
			n += length * length
			if mergeKey := rules.GetPatchMergeKey(); mergeKey != "" && !isOrder {
				n += elementComparisons(o, p, mergeKey, elements)
			}
		}
	}
	return n
}

// elementComparisons returns mergeComparisons of the elements of a list, which have their keys in the field mergeKey.
func elementComparisons(original, patch []any, mergeKey string, schema strategicpatch.LookupPatchMeta) (n int) {
	byKey := make(map[string]map[string]any, len(original))
	for _, e := range original {
		if o, ok := e.(map[string]any); ok {
			byKey[fmt.Sprint(o[mergeKey])] = o
		}
	}
	for _, e := range patch {
		if p, ok := e.(map[string]any); ok {
			n += mergeComparisons(byKey[fmt.Sprint(p[mergeKey])], p, schema)
		}
	}
	return n
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
