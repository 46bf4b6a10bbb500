package handlers

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apistorage "k8s.io/apiserver/pkg/storage"
)

// A read of a revision that has not arrived ends after 3 s, with kube-apiserver's error. Only the probe is repeated.
func TestAReadWaits3SecondsForItsRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		future := func() error { return apistorage.NewTooLargeResourceVersionError(9, 7, 0) }
		reads := 0
		err := waitUntilFresh(t.Context(), func() error { reads++; return future() }, future)
		if reads != 1 {
			t.Errorf("%d reads", reads)
		}
		took := time.Since(began)
		if !apistorage.IsTooLargeResourceVersion(err) || took < 3*time.Second || took > 3*time.Second+2*freshnessPoll {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// An error quotes at most 30 bytes of a body, in hexadecimal unless it is JSON.
func TestAnErrorQuotes30BytesOfABody(t *testing.T) {
	for first, want := range map[string]int{"{": 30, "k": 60} {
		got, ok := strings.CutSuffix(summarizeData([]byte(first+strings.Repeat("x", 3<<20))), " ...")
		if len(got) != want || !ok {
			t.Errorf("%s: %.100q of %d characters, want %d", first, got, len(got), want)
		}
	}
}

// Only an error prints the patched object, because printing 150,000 keys takes half a second.
func TestAPatchIsPrintedForARefusalOnly(t *testing.T) {
	odd := []error{errors.New(`unknown field "x"`)}
	for directive, want := range map[string]bool{
		metav1.FieldValidationWarn:   false,
		metav1.FieldValidationStrict: true,
	} {
		printed := false
		p := &patcher{directive: directive}
		err := p.handleStrictErrors(t.Context(), odd, func() string { printed = true; return "" })
		if printed != want || apierrors.IsInvalid(err) != want {
			t.Errorf("%s: printed %v, %v", directive, printed, err)
		}
		if err := p.handleStrictErrors(t.Context(), nil, func() string { t.Error("printed"); return "" }); err != nil {
			t.Errorf("%s: %v", directive, err)
		}
	}
}
