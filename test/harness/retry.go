package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// Retrying returns a transport that repeats a request with Retry-After in its response, up to ten times, as client-go
// does. A server responds so after a pause of the machine, until its policy is fresh again. A request with a body needs
// GetBody, which http.NewRequest sets.
func Retrying(next http.RoundTripper) http.RoundTripper { return retrying{next} }

type retrying struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (r retrying) RoundTrip(req *http.Request) (*http.Response, error) {
	for attempt := 0; ; attempt++ {
		resp, err := r.next.RoundTrip(req)
		if err != nil || attempt == 10 || req.Body != nil && req.GetBody == nil {
			return resp, err
		}
		seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		rejected := resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= http.StatusInternalServerError
		if err != nil || !rejected {
			return resp, nil
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		select {
		case <-req.Context().Done():
			return nil, req.Context().Err()
		case <-time.After(time.Duration(seconds) * time.Second):
		}
		if req.GetBody != nil {
			req = req.Clone(req.Context())
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// Failure returns the error of a response as client-go does, or nil if its status code is below 300.
func Failure(code int, body string) error {
	if code < 300 {
		return nil
	}
	var status metav1.Status
	if json.Unmarshal([]byte(body), &status) == nil && status.Status == metav1.StatusFailure {
		return &apierrors.StatusError{ErrStatus: status}
	}
	return fmt.Errorf("%d %.300s", code, body)
}

// HTTPClient returns a client with the credentials of a configuration that repeats requests as Retrying does.
func HTTPClient(config *rest.Config) (*http.Client, error) {
	config = rest.CopyConfig(config)
	config.Wrap(Retrying)
	return rest.HTTPClientFor(config)
}

// Write calls write until its result is known. etcd gives up a write after 7 s, for example after a pause of the
// machine, and may have made it. A repeated create that finds its object has succeeded.
func Write(t testing.TB, write func() error) {
	t.Helper()
	if err := written(write); err != nil {
		t.Fatal(err)
	}
}

// TryWrite is Write for other goroutines than the test's: the test fails, and the goroutine continues.
func TryWrite(t testing.TB, write func() error) {
	t.Helper()
	if err := written(write); err != nil {
		t.Error(err)
	}
}

func written(write func() error) error {
	deadline := time.Now().Add(Soon)
	for repeated := false; ; repeated = true {
		err := write()
		switch {
		case err == nil, repeated && apierrors.IsAlreadyExists(err):
			return nil
		case !UnknownResult(err) || time.Now().After(deadline):
			return err
		}
		time.Sleep(20 * time.Millisecond) // between two attempts
	}
}

// UnknownResult reports whether a write with this error may have been made, or may succeed later.
func UnknownResult(err error) bool {
	text := err.Error()
	return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsServiceUnavailable(err) ||
		errors.Is(err, os.ErrDeadlineExceeded) || strings.Contains(text, "etcdserver: request timed out") ||
		strings.Contains(text, "etcdserver: leader changed")
}
