package harness

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The second attempt has the same body, and gets the response.
func TestRetryingRepeatsTheBody(t *testing.T) {
	requests := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if requests++; requests == 1 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = io.Copy(w, req.Body)
	}))
	defer s.Close()
	resp, err := (&http.Client{Transport: Retrying(http.DefaultTransport)}).Post(s.URL, "", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); string(body) != "body" || requests != 2 {
		t.Errorf("%q after %d requests", body, requests)
	}
}

func TestAWriteOfUnknownResultIsRepeated(t *testing.T) {
	results := []error{
		apierrors.NewInternalError(errors.New("etcdserver: request timed out")),
		apierrors.NewAlreadyExists(schema.GroupResource{Resource: "pods"}, "p"),
	}
	Write(t, func() (err error) {
		err, results = results[0], results[1:]
		return err
	})
	if len(results) > 0 {
		t.Errorf("%d attempts are missing", len(results))
	}
}

func TestAFailureOfUnknownResultIsRecognized(t *testing.T) {
	status := `{"kind":"Status","status":"Failure","message":"etcdserver: request timed out","code":500}`
	if err := Failure(500, status); err == nil || !UnknownResult(err) {
		t.Error(err)
	}
	if err := Failure(403, "forbidden"); err == nil || UnknownResult(err) {
		t.Error(err)
	}
	if err := Failure(201, "{}"); err != nil {
		t.Error(err)
	}
}
