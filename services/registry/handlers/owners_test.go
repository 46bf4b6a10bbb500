package handlers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// distinctOwners keeps the references that kube-apiserver keeps, in the same order.
func TestRepeatedOwnersAreDroppedByUpstreamsRule(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	text := func() string { return []string{"", "a", "b"}[random.IntN(3)] }
	flag := func() *bool { return []*bool{nil, new(true), new(false)}[random.IntN(3)] }
	for range 300 {
		refs := make([]metav1.OwnerReference, random.IntN(60))
		for i := range refs {
			refs[i] = metav1.OwnerReference{
				APIVersion:         text(),
				Kind:               text(),
				Name:               text(),
				UID:                types.UID(text()),
				Controller:         flag(),
				BlockOwnerDeletion: flag(),
			}
		}
		var wantUnique []metav1.OwnerReference
		var wantDuplicates []string
		for _, ref := range refs {
			equal := func(k metav1.OwnerReference) bool { return apiequality.Semantic.DeepEqual(k, ref) }
			if slices.ContainsFunc(wantUnique, equal) {
				wantDuplicates = append(wantDuplicates, string(ref.UID))
			} else {
				wantUnique = append(wantUnique, ref)
			}
		}
		unique, duplicates := distinctOwners(refs)
		if !apiequality.Semantic.DeepEqual(unique, wantUnique) || !slices.Equal(duplicates, wantDuplicates) {
			t.Fatalf("of %v:\nkept %v\nwant %v\nduplicates %v\nwant %v", refs, unique, wantUnique, duplicates,
				wantDuplicates)
		}
	}
}

// Large lists take milliseconds. A comparison of each pair takes minutes and exceeds the package's timeout.
func TestManyOwnersAreReadOnce(t *testing.T) {
	const many = 100_000
	refs := make([]metav1.OwnerReference, many)
	for i := range refs { // upstream's rule is quadratic for references of one UID
		refs[i] = metav1.OwnerReference{Name: fmt.Sprint(i), UID: "1"}
	}
	unique, duplicates := distinctOwners(slices.Concat(refs, refs))
	if len(unique) != many || len(duplicates) != many {
		t.Errorf("%d kept and %d duplicates, want %d of each", len(unique), len(duplicates), many)
	}
}
