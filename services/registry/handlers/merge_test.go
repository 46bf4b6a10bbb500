package handlers

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
)

// numbered returns n elements from a number on: strings, or objects with a key if it is not empty.
func numbered(key string, from, n int) []any {
	list := make([]any, n)
	for i := range list {
		list[i] = fmt.Sprint(from + i)
		if key != "" {
			list[i] = map[string]any{key: list[i]}
		}
	}
	return list
}

// A patch with lists that take too long to merge is rejected. kube-apiserver merges them for minutes.
func TestALongStrategicMergeIsRejected(t *testing.T) {
	metadata := func(field string, list []any) map[string]any {
		return map[string]any{"metadata": map[string]any{field: list}}
	}
	pod := func(field string, lists ...[]any) map[string]any { // a list for each container of the same name
		var containers []any
		for _, list := range lists {
			containers = append(containers, map[string]any{"name": "a", field: list})
		}
		return map[string]any{"spec": map[string]any{"containers": containers}}
	}
	rules := func(list []any) map[string]any {
		return map[string]any{"rules": []any{map[string]any{"resourceNames": list}}}
	}
	const long = 18_000
	many := make([][]any, 60_000) // the count itself takes no quadratic time
	for i := range many {
		many[i] = numbered("name", i, 1)
	}
	for name, c := range map[string]struct {
		original, patch map[string]any
		of              runtime.Object
		rejected        bool
	}{
		"short": {
			metadata("ownerReferences", numbered("uid", 0, 100)),
			metadata("ownerReferences", numbered("uid", 50, 100)), &corev1.ConfigMap{}, false,
		},
		"a long patch": {
			metadata("ownerReferences", numbered("uid", 0, 1)),
			metadata("ownerReferences", numbered("uid", 1, long)), &corev1.ConfigMap{}, true,
		},
		"a single element for a long list": {
			metadata("ownerReferences", numbered("uid", 0, long)),
			metadata("ownerReferences", numbered("uid", 0, 1)), &corev1.ConfigMap{}, true,
		},
		"scalars": {
			metadata("finalizers", numbered("", 0, long)),
			metadata("finalizers", numbered("", 0, 1)), &corev1.ConfigMap{}, true,
		},
		"an order": {
			metadata("finalizers", numbered("", 0, long)),
			metadata("$setElementOrder/finalizers", numbered("", 0, 1)), &corev1.ConfigMap{}, true,
		},
		"a list in an element": {
			pod("env", numbered("name", 0, long)), pod("env", numbered("name", 0, 1)), &corev1.Pod{}, true,
		},
		"lists in elements with the same key": {
			pod("ports", nil),
			pod("env", numbered("name", 0, long/2), numbered("name", 0, long/2)), &corev1.Pod{}, true,
		},
		"lists in new elements with the same key": {
			map[string]any{"spec": map[string]any{"containers": []any{}}},
			pod("env", numbered("name", 0, long/2), numbered("name", 0, long/2)), &corev1.Pod{}, true,
		},
		"a list in a new element": {
			map[string]any{"spec": map[string]any{"containers": []any{}}},
			pod("env", numbered("name", 0, long)), &corev1.Pod{}, false,
		},
		"an order of a list that the patch replaces": {
			pod("args", numbered("", 0, long)), pod("$setElementOrder/args", numbered("", 0, 1)), &corev1.Pod{}, true,
		},
		"a deletion from a list that the patch replaces": {
			pod("args", numbered("", 0, long)), pod("$deleteFromPrimitiveList/args", numbered("", 0, 1)), &corev1.Pod{},
			true,
		},
		"many lists in elements": {
			pod("env", numbered("name", 0, long/2)), pod("env", many...), &corev1.Pod{}, true,
		},
		"a list that the object lacks": {
			metadata("annotations", nil),
			metadata("ownerReferences", numbered("uid", 0, long)), &corev1.ConfigMap{}, false,
		},
		"a list that the patch replaces": {
			rules(numbered("", 0, long)), rules(numbered("", 0, long)), &rbacv1.Role{}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := strategicMerge(t.Context(), c.original, c.patch, c.of)
			if err != nil {
				err = strategicError(err)
			}
			if apierrors.IsRequestEntityTooLargeError(err) != c.rejected || err != nil && !c.rejected {
				t.Errorf("%v, want it rejected: %v", err, c.rejected)
			}
		})
	}
}
