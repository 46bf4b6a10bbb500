package routing

import (
	"net/http"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	// SlowThreshold is the least duration of a slow request. kube-apiserver logs the steps of such a request.
	SlowThreshold = 500 * time.Millisecond
	// maxSlow bounds the slow requests that a gateway holds, and maxSlowText each of their texts in bytes.
	maxSlow     = 64
	maxSlowText = 256
)

// SlowRequest is a request for a resource that took SlowThreshold or longer. It has no name, namespace or query,
// because its readers may not be allowed to read the object.
type SlowRequest struct {
	Received time.Time `json:"received"`
	Seconds  float64   `json:"seconds"`
	User     string    `json:"user"`
	Verb     string    `json:"verb"`
	// Resource is the resource, its group and its subresource, such as "deployments.apps/scale".
	Resource string `json:"resource"`
	Code     int    `json:"code"`
	// Trace is the trace id of a sampled request.
	Trace string `json:"trace,omitempty"`
}

// SlowRequests holds the newest slow requests. The zero value is ready to use. Its methods accept nil.
type SlowRequests struct {
	mu     sync.Mutex
	newest []SlowRequest // the oldest first
}

// add adds a request that ends now.
func (s *SlowRequests) add(req *http.Request, info *request.RequestInfo, code int, took time.Duration) {
	if s == nil {
		return
	}
	r := SlowRequest{
		Received: time.Now().Add(-took),
		Seconds:  took.Seconds(),
		Verb:     info.Verb,
		Resource: strings.TrimSuffix(info.Resource+"."+info.APIGroup, "."),
		Code:     code,
	}
	if info.Subresource != "" {
		r.Resource += "/" + info.Subresource
	}
	if u, ok := request.UserFrom(req.Context()); ok {
		r.User = u.GetName()
	}
	if span := trace.SpanContextFromContext(req.Context()); span.IsSampled() {
		r.Trace = span.TraceID().String()
	}
	for _, text := range []*string{&r.User, &r.Resource} { // a copy releases the request
		*text = strings.Clone((*text)[:min(len(*text), maxSlowText)])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.newest) == maxSlow {
		s.newest = append(s.newest[:0], s.newest[1:]...)
	}
	s.newest = append(s.newest, r)
}

// Newest returns at most n requests, the newest first.
func (s *SlowRequests) Newest(n int) []SlowRequest {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []SlowRequest
	for i := len(s.newest) - 1; i >= 0 && len(all) < n; i-- {
		all = append(all, s.newest[i])
	}
	return all
}
