package admission

import (
	"net/http"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// pluginClient returns the client of the plugins.
func pluginClient(config *rest.Config) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return documentBound{indexRetrier{next}} })
	return kubernetes.NewForConfig(config)
}

// indexRetrier repeats a request for the index of OpenAPI documents that fails while the gateway starts.
// MutatingAdmissionPolicy requests the index at its start, and every 5 s from then on. It rejects all objects that a
// policy with an apply configuration matches until it has the index.
type indexRetrier struct{ next http.RoundTripper }

const (
	indexRetryInterval = 50 * time.Millisecond
	// indexRetries covers the 5 s until the plugin's next request.
	indexRetries = 100
)

// RoundTrip implements http.RoundTripper.
func (r indexRetrier) RoundTrip(req *http.Request) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		resp, err := r.next.RoundTrip(req)
		failed := err != nil || resp.StatusCode == http.StatusServiceUnavailable
		if req.URL.Path != "/openapi/v3" || !failed || attempt == indexRetries {
			return resp, err
		}
		select {
		case <-req.Context().Done():
			return resp, err
		case <-time.After(indexRetryInterval):
		}
		if err == nil {
			_ = resp.Body.Close()
		}
	}
}

// maxDocumentBytes bounds an OpenAPI document. A document of an aggregated server has the size that the server chooses.
const maxDocumentBytes = 16 << 20

// documentBound bounds the OpenAPI documents that plugins read.
type documentBound struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b documentBound) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(req)
	if err == nil && strings.HasPrefix(req.URL.Path, "/openapi/") {
		resp.Body = http.MaxBytesReader(nil, resp.Body, maxDocumentBytes)
	}
	return resp, err
}
