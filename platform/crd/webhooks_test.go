package crd

import (
	"compress/gzip"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/conversion"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/egress"
)

// The response of a conversion webhook has at most 16 MB plus four times the request. The error names the webhook.
func TestConversionResponsesAreBounded(t *testing.T) {
	padding := 0 // bytes in the response
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review struct {
			Request struct {
				UID     string
				Objects []map[string]any
			}
		}
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			t.Error(err)
		}
		for _, o := range review.Request.Objects {
			o["apiVersion"] = "example.com/v2"
		}
		objects, _ := json.Marshal(review.Request.Objects)
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Type", "application/json")
		z := gzip.NewWriter(w)
		defer z.Close()
		fmt.Fprintf(z, `{"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview","response":{"uid":%q,`+
			`"result":{"status":"Success"},"convertedObjects":%s}}%s`, review.Request.UID, objects,
			strings.Repeat(" ", padding))
	}))
	t.Cleanup(hook.Close)
	definition := widgets()
	url := hook.URL + "/convert"
	definition.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
		Strategy: apiextensionsv1.WebhookConverter,
		Webhook: &apiextensionsv1.WebhookConversion{
			ConversionReviewVersions: []string{"v1"},
			ClientConfig: &apiextensionsv1.WebhookClientConfig{
				URL:      &url,
				CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw}),
			},
		},
	}
	f, err := conversion.NewCRConverterFactory(nil, Webhooks(egress.Selector{}, &rest.Config{}))
	if err != nil {
		t.Fatal(err)
	}
	safe, _, err := f.NewConverter(definition)
	if err != nil {
		t.Fatal(err)
	}
	convert := func(of, filled int) error {
		padding = filled
		list := &unstructured.UnstructuredList{Object: map[string]any{
			"apiVersion": "example.com/v1", "kind": "WidgetList", "metadata": map[string]any{}}}
		for i := range of {
			list.Items = append(list.Items, unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "example.com/v1", "kind": "Widget",
				"metadata": map[string]any{"name": fmt.Sprint(i)},
				"spec":     strings.Repeat("x", 1<<20),
			}})
		}
		_, err := safe.ConvertToVersion(list, schema.GroupVersion{Group: "example.com", Version: "v2"})
		return err
	}
	if err := convert(1, 0); err != nil {
		t.Errorf("a small answer: %v", err)
	}
	if err := convert(3, 24<<20); err != nil { // the bound is 28 MB
		t.Errorf("a large answer to a large request: %v", err)
	}
	if err := convert(1, 24<<20); err == nil || !strings.Contains(err.Error(), "/convert answers with more than") {
		t.Errorf("a large answer to a small request: %v", err)
	}
}
