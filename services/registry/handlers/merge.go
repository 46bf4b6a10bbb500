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

// maxMergeComparisons is the maximum of mergeComparisons. So many take some 10 s. The timeout of a write does not stop
// the merge of a list.
const maxMergeComparisons = 300_000_000

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
	var n mergeComparisons
	if n.add(original, []map[string]any{patch}, schema); n > maxMergeComparisons {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf(
			"the lists are too long for a strategic merge patch, which may take %d comparisons of elements",
			maxMergeComparisons))
	}
	return strategicpatch.StrategicMergeMapPatchUsingLookupPatchMeta(original, patch, cancelablePatchMeta{schema, ctx})
}

// mergeComparisons is about how many comparisons of elements a strategic merge takes. Counting stops above
// maxMergeComparisons.
type mergeComparisons int

// patchedField has the values of a field in all patches.
type patchedField struct {
	maps  []map[string]any
	lists [][]any
	// elements is the length of all lists, also of directives.
	elements int
	// directive: a patch orders the list, or deletes elements of it. Upstream then compares all elements, also if the
	// field's rules replace the list.
	directive bool
}

// add counts the merge of patches, in order, into an object. Elements of a patch with the same key are merged into the
// same element. The original is nil if the object has no such element: the first patch then takes its place.
func (n *mergeComparisons) add(original map[string]any, patches []map[string]any,
	schema strategicpatch.LookupPatchMeta) {
	if original == nil && len(patches) < 2 || *n > maxMergeComparisons {
		return
	}
	fields := map[string]*patchedField{}
	for _, patch := range patches {
		for key, v := range patch {
			key, deletes := strings.CutPrefix(key, "$deleteFromPrimitiveList/")
			key, orders := strings.CutPrefix(key, "$setElementOrder/")
			f := fields[key]
			if f == nil {
				f = &patchedField{}
				fields[key] = f
			}
			f.directive = f.directive || deletes || orders
			switch v := v.(type) {
			case map[string]any:
				f.maps = append(f.maps, v)
			case []any:
				f.elements += len(v)
				if !deletes && !orders {
					f.lists = append(f.lists, v)
				}
			}
		}
	}
	for key, f := range fields {
		if len(f.maps) > 0 {
			if sub, _, err := schema.LookupPatchMetadataForStruct(key); err == nil {
				o, _ := original[key].(map[string]any)
				n.add(o, f.maps, sub)
			}
		}
		if f.elements > 0 {
			n.addLists(original, key, f, schema)
		}
	}
}

// addLists counts the merge of the lists of a field. A list whose elements are merged takes the square of its elements,
// also if the patch has a single element.
func (n *mergeComparisons) addLists(original map[string]any, key string, f *patchedField,
	schema strategicpatch.LookupPatchMeta) {
	o, ok := original[key].([]any)
	sub, rules, err := schema.LookupPatchMetadataForSlice(key)
	merges := slices.Contains(rules.GetPatchStrategies(), "merge") && (ok || len(f.lists) > 1)
	if err != nil || !merges && !f.directive { // the patch replaces the list, or has an error that the merge reports
		return
	}
	length := mergeComparisons(len(o) + f.elements)
	*n += length * length
	mergeKey := rules.GetPatchMergeKey()
	if mergeKey == "" || *n > maxMergeComparisons {
		return
	}
	byKey := map[string][]map[string]any{}
	for _, list := range f.lists {
		for _, e := range list {
			if p, ok := e.(map[string]any); ok {
				k := fmt.Sprint(p[mergeKey])
				byKey[k] = append(byKey[k], p)
			}
		}
	}
	originals := map[string]map[string]any{}
	for _, e := range o {
		if p, ok := e.(map[string]any); ok {
			if k := fmt.Sprint(p[mergeKey]); byKey[k] != nil {
				originals[k] = p
			}
		}
	}
	for k, patches := range byKey {
		n.add(originals[k], patches, sub)
	}
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
