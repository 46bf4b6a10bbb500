package admission

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"k8s.io/client-go/rest"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// The plugins get the index of OpenAPI documents as soon as the gateway serves it, and other responses unchanged.
func TestTheOpenAPIIndexIsRequestedUntilItIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := map[string]int{}
		client, err := pluginClient(&rest.Config{Host: "http://gateway",
			Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
				requests[r.URL.Path]++
				switch requests[r.URL.Path] {
				case 1:
					return nil, io.ErrUnexpectedEOF
				case 2:
					return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: http.NoBody}, nil
				}
				body := io.NopCloser(strings.NewReader(`{"paths":{"api/v1":{}}}`))
				return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
			})})
		if err != nil {
			t.Fatal(err)
		}
		if paths, err := client.Discovery().OpenAPIV3().Paths(); err != nil || len(paths) != 1 {
			t.Errorf("got %v, %v", paths, err)
		}
		if _, err := client.Discovery().ServerVersion(); err == nil {
			t.Error("another request was repeated")
		}
	})
}
