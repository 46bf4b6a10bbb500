package crd

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

// hook is a conversion webhook that does not respond for objects with the name "hangs".
type hook struct {
	*httptest.Server
	come, gone chan struct{}
}

func newHook(t *testing.T) *hook {
	h := &hook{come: make(chan struct{}, 10), gone: make(chan struct{}, 10)}
	h.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review apiextensionsv1.ConversionReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		response := &apiextensionsv1.ConversionResponse{UID: review.Request.UID}
		response.Result.Status = "Success"
		for _, o := range review.Request.Objects {
			u := &unstructured.Unstructured{}
			if err := u.UnmarshalJSON(o.Raw); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			if u.GetName() == "hangs" {
				h.come <- struct{}{}
				<-req.Context().Done()
				h.gone <- struct{}{}
				return
			}
			u.SetAPIVersion(review.Request.DesiredAPIVersion)
			o.Raw, o.Object = nil, u
			response.ConvertedObjects = append(response.ConvertedObjects, o)
		}
		review.Request, review.Response = nil, response
		_ = json.NewEncoder(w).Encode(&review)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hook) converter(t *testing.T) *Converter {
	t.Helper()
	d, err := define(t, func(d *apiextensionsv1.CustomResourceDefinition) {
		d.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
			Strategy: apiextensionsv1.WebhookConverter,
			Webhook: &apiextensionsv1.WebhookConversion{
				ConversionReviewVersions: []string{"v1"},
				ClientConfig: &apiextensionsv1.WebhookClientConfig{
					URL: ptr.To(h.URL + "/convert"),
					CABundle: pem.EncodeToMemory(&pem.Block{
						Type:  "CERTIFICATE",
						Bytes: h.Certificate().Raw,
					}),
				},
			},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := d.Converter(NewConverters(nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func named(name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "example.com/v1",
		"kind":       "Widget",
		"metadata":   map[string]any{"name": name},
	}}
}

// A conversion ends with its API request, and the webhook's request is cancelled. Concurrent conversions of other
// requests continue over the same connections.
func TestAConversionEndsWithItsRequest(t *testing.T) {
	h := newHook(t)
	c := h.converter(t)
	to := schema.GroupVersion{Group: "example.com", Version: "v2"}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		safe, _ := c.WithContext(ctx)
		_, err := safe.ConvertToVersion(named("hangs"), to)
		ended <- err
	}()
	<-h.come
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			other, gone := context.WithCancel(t.Context())
			safe, _ := c.WithContext(other)
			out, err := safe.ConvertToVersion(named("answers"), to)
			if err != nil || out.GetObjectKind().GroupVersionKind().Version != "v2" {
				t.Errorf("%v, %v", out, err)
			}
			gone()
		})
	}
	wg.Wait()
	select {
	case err := <-ended:
		t.Fatalf("it ended with another request: %v", err)
	default:
	}
	cancel()
	select {
	case <-h.gone:
	case <-time.After(2 * time.Minute):
		t.Fatal("the webhook's request goes on")
	}
	if err := <-ended; err == nil {
		t.Error("a conversion that was given up has no error")
	}
	safe, _ := c.WithContext(ctx)
	if _, err := safe.ConvertToVersion(named("answers"), to); err == nil {
		t.Error("a request that is over has an object converted")
	}
	if n := len(c.idle); n == 0 || n > idleClients {
		t.Errorf("%d clients are kept", n)
	}
}
