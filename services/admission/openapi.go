package admission

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// pluginClient returns the client of the plugins.
func pluginClient(config *rest.Config, policies *policyPresence) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &indexHold{next: documentBound{indexRetrier{next}}, policies: policies}
	})
	return kubernetes.NewForConfig(config)
}

// policyPresence knows whether a MutatingAdmissionPolicy exists.
type policyPresence struct {
	exists func() bool
	// added has a value after a policy was added.
	added chan struct{}
}

// newPolicyPresence watches policies with informers. always is true if policies may also come from elsewhere.
func newPolicyPresence(factory informers.SharedInformerFactory, always bool) (*policyPresence, error) {
	policies := factory.Admissionregistration().V1().MutatingAdmissionPolicies()
	p := &policyPresence{added: make(chan struct{}, 1)}
	store := policies.Informer().GetStore()
	p.exists = func() bool { return always || len(store.ListKeys()) > 0 }
	_, err := policies.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) {
		select {
		case p.added <- struct{}{}:
		default:
		}
	}})
	return p, err
}

// indexHold holds a request for the index of OpenAPI documents while no MutatingAdmissionPolicy exists, and responds
// with the last index. The plugin requests the index every 5 s. After a change of a CRD, the registry builds all
// documents of its group for an index: 3 s of a processor for a group of 1,000 CRDs. A new policy ends the hold.
type indexHold struct {
	next     http.RoundTripper
	policies *policyPresence

	mu   sync.Mutex
	last []byte
}

// holdTimeout leaves a request that is held 20 s of client-go's 32 s for a new index.
const holdTimeout = 12 * time.Second

// RoundTrip implements http.RoundTripper.
func (h *indexHold) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Path != "/openapi/v3" {
		return h.next.RoundTrip(req)
	}
	h.mu.Lock()
	last := h.last
	h.mu.Unlock()
	if last != nil && !h.policies.exists() {
		timeout := time.NewTimer(holdTimeout)
		defer timeout.Stop()
		select {
		case <-h.policies.added:
		case <-timeout.C:
			return indexResponse(req, last), nil
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	resp, err := h.next.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	h.last = data
	h.mu.Unlock()
	return indexResponse(req, data), nil
}

func indexResponse(req *http.Request, index []byte) *http.Response {
	return &http.Response{
		Status:        "200 OK",
		StatusCode:    http.StatusOK,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        http.Header{"Content-Type": {"application/json"}},
		ContentLength: int64(len(index)),
		Body:          io.NopCloser(bytes.NewReader(index)),
		Request:       req,
	}
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
