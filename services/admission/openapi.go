package admission

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/lifecycle"
)

// pluginClient returns the client of the plugins. A nil hold leaves their requests as they are.
func pluginClient(config *rest.Config, hold *indexHold) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		next = documentBound{indexRetrier{next}}
		if hold == nil {
			return next
		}
		hold.next = next
		return hold
	})
	return kubernetes.NewForConfig(config)
}

// indexHold holds requests for the index of OpenAPI documents while no MutatingAdmissionPolicy exists. The policies'
// plugin requests the index every 5 s. Registry then builds all documents of each group whose CRDs have changed: a
// group of 1,000 CRDs takes 3 s of a processor.
type indexHold struct {
	next http.RoundTripper
	// exists reports whether a policy exists. added has a value after a policy was added.
	exists func() bool
	added  chan struct{}
	// stopped is closed when the service ends.
	stopped <-chan struct{}
	// read is true once the plugin has an index.
	read atomic.Bool
}

// maxIndexAge is how old the plugin's index may be while no policy exists.
const maxIndexAge = time.Minute

// newIndexHold returns a hold that reads policies with factory.
func newIndexHold(factory informers.SharedInformerFactory, stopped <-chan struct{}) (*indexHold, error) {
	policies := factory.Admissionregistration().V1().MutatingAdmissionPolicies().Informer()
	h := &indexHold{
		exists:  func() bool { return len(policies.GetStore().ListKeys()) > 0 },
		added:   make(chan struct{}, 1),
		stopped: stopped,
	}
	_, err := policies.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) {
		select {
		case h.added <- struct{}{}:
		default:
		}
	}})
	return h, err
}

// RoundTrip implements http.RoundTripper.
func (h *indexHold) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path != indexPath {
		return h.next.RoundTrip(req)
	}
	if h.read.Load() && !h.exists() {
		select {
		case <-h.added:
		case <-time.After(maxIndexAge):
		case <-h.stopped: // indexRetrier would repeat the request while the gateway stops
			return nil, context.Canceled
		}
	}
	resp, err := h.next.RoundTrip(req)
	if err == nil && resp.StatusCode == http.StatusOK {
		h.read.Store(true)
	}
	return resp, err
}

// indexRetrier repeats a request for the index of OpenAPI documents that fails while the gateway starts.
// MutatingAdmissionPolicy requests the index at its start, and every 5 s from then on. It rejects all objects that a
// policy matches until it has the index.
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
		if req.URL.Path != indexPath || !failed || attempt == indexRetries {
			return resp, err
		}
		if lifecycle.Sleep(req.Context(), indexRetryInterval) != nil {
			return resp, err
		}
		if err == nil {
			_ = resp.Body.Close()
		}
	}
}

// indexPath is the path of the index of OpenAPI documents.
const indexPath = "/openapi/v3"

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
