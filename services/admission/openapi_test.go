package admission

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
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
			})}, nil)
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

// While no MutatingAdmissionPolicy exists, a plugin's request for the index waits. The first policy sends the request
// to the gateway at once.
func TestTheOpenAPIIndexIsHeldUntilAPolicyExists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var exists atomic.Bool
		stopped, requests := make(chan struct{}), 0
		hold := &indexHold{exists: exists.Load, added: make(chan struct{}, 1), stopped: stopped}
		client, err := pluginClient(&rest.Config{Host: "http://gateway",
			Transport: roundTripper(func(*http.Request) (*http.Response, error) {
				requests++
				body := io.NopCloser(strings.NewReader(fmt.Sprintf(`{"paths":{"apis/v%d":{}}}`, requests)))
				return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
			})}, hold)
		if err != nil {
			t.Fatal(err)
		}
		expect := func(path string, held time.Duration) {
			t.Helper()
			began := time.Now()
			paths, err := client.Discovery().OpenAPIV3().Paths()
			if err != nil || paths[path] == nil || time.Since(began) != held {
				t.Errorf("after %v: %v, %v; want %s after %v", time.Since(began), paths, err, path, held)
			}
		}
		expect("apis/v1", 0)
		expect("apis/v2", maxIndexAge)
		time.AfterFunc(time.Second, func() { exists.Store(true); hold.added <- struct{}{} })
		expect("apis/v3", time.Second)
		expect("apis/v4", 0)
		exists.Store(false)
		close(stopped)
		if _, err := client.Discovery().OpenAPIV3().Paths(); !errors.Is(err, context.Canceled) || requests != 4 {
			t.Errorf("after the stop: %v, %d requests", err, requests)
		}
	})
}

// A hold sees the policies of the cluster.
func TestAHoldSeesPolicies(t *testing.T) {
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	hold, err := newIndexHold(factory, nil)
	if err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	if hold.exists() {
		t.Error("a policy exists")
	}
	if _, err := client.AdmissionregistrationV1().MutatingAdmissionPolicies().Create(t.Context(),
		&admissionregistrationv1.MutatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if <-hold.added; !hold.exists() {
		t.Error("the policy does not exist")
	}
}

// A plugin reads a document up to the bound. A larger document is an error, because an aggregated server may send
// without end.
func TestDocumentsAreBounded(t *testing.T) {
	for path, bounded := range map[string]bool{"/openapi/v3/apis/a.example.com/v1": true, "/api/v1/pods": false} {
		b := documentBound{roundTripper(func(*http.Request) (*http.Response, error) {
			body := io.NopCloser(io.LimitReader(zeros{}, maxDocumentBytes+1))
			return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
		})}
		req, err := http.NewRequest(http.MethodGet, "http://gateway"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := b.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, resp.Body)
		if bounded != (err != nil) || bounded != (n == maxDocumentBytes) {
			t.Errorf("%s: %d bytes, %v", path, n, err)
		}
	}
}

// zeros is a reader without an end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
