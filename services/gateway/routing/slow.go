package routing

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/telemetry"
	"watershed.dev/services/gateway/watch"
)

const (
	// SlowThreshold is the least duration of a slow request. The log has the steps of the same requests.
	SlowThreshold = telemetry.SlowRequest
	// maxSlow bounds the slow requests that a gateway holds, and maxSlowOfUser the slow requests of a user, because
	// clients can make their requests slow. maxSlowResource bounds the name of a resource in bytes.
	maxSlow         = 64
	maxSlowOfUser   = 8
	maxSlowResource = 256
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
		r.User = strings.Clone(watch.ShortName(u.GetName()))
	}
	if span := trace.SpanContextFromContext(req.Context()); span.IsSampled() {
		r.Trace = span.TraceID().String()
	}
	r.Resource = strings.Clone(r.Resource[:min(len(r.Resource), maxSlowResource)]) // a copy releases the request
	s.mu.Lock()
	defer s.mu.Unlock()
	ofUser, oldest := 0, 0 // oldest is the index of the user's oldest request
	for i, other := range slices.Backward(s.newest) {
		if other.User == r.User {
			ofUser, oldest = ofUser+1, i
		}
	}
	switch {
	case ofUser == maxSlowOfUser:
		s.newest = slices.Delete(s.newest, oldest, oldest+1)
	case len(s.newest) == maxSlow:
		s.newest = slices.Delete(s.newest, 0, 1)
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
