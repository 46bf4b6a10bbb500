package e2e

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// converter is a conversion webhook: hostPort in v1 is host and port in v2.
type converter struct {
	*httptest.Server
	calls, objects atomic.Int64
	hang           atomic.Pointer[chan struct{}]
	fail           atomic.Bool
}

func newConverter(t *testing.T) *converter {
	c := &converter{}
	c.Server = httptest.NewUnstartedServer(http.HandlerFunc(c.serve))
	c.TLS = &tls.Config{}
	c.StartTLS()
	t.Cleanup(c.Close)
	return c
}

func (c *converter) config() string {
	ca := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{
		Type:  "CERTIFICATE",
		Bytes: c.Certificate().Raw,
	}))
	return fmt.Sprintf(
		`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {url: "%s/convert", `+
			`caBundle: %s}}}`, c.URL, ca)
}

func (c *converter) serve(w http.ResponseWriter, req *http.Request) {
	var review struct {
		APIVersion, Kind string
		Request          struct {
			UID, DesiredAPIVersion string
			Objects                []map[string]any
		}
	}
	body, _ := io.ReadAll(req.Body)
	if err := json.Unmarshal(body, &review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.calls.Add(1)
	c.objects.Add(int64(len(review.Request.Objects)))
	if h := c.hang.Load(); h != nil {
		select {
		case <-*h:
		case <-req.Context().Done():
		}
	}
	response := map[string]any{"uid": review.Request.UID, "result": map[string]any{"status": "Success"}}
	if c.fail.Load() {
		response["result"] = map[string]any{"status": "Failure", "message": "no way"}
	} else {
		for _, o := range review.Request.Objects {
			o["apiVersion"] = review.Request.DesiredAPIVersion
			spec, _ := o["spec"].(map[string]any)
			if strings.HasSuffix(review.Request.DesiredAPIVersion, "/v2") {
				host, port, _ := strings.Cut(fmt.Sprint(spec["hostPort"]), ":")
				spec["host"], spec["port"] = host, port
				delete(spec, "hostPort")
			} else {
				spec["hostPort"] = fmt.Sprint(spec["host"], ":", spec["port"])
				delete(spec, "host")
				delete(spec, "port")
			}
		}
		response["convertedObjects"] = review.Request.Objects
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": review.APIVersion,
		"kind":       review.Kind,
		"response":   response,
	})
}

// TestConversionWebhook checks that lists, watches and selectors use each version's own fields. A list calls the
// webhook once. A webhook that fails or hangs affects no other resource.
func TestConversionWebhook(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	hook := newConverter(t)
	ctx := t.Context()
	define(t, s, widgetsDefinition(hook.config()))
	v1 := dynamicFor(t, s).Resource(widgets).Namespace("default")
	v2 := dynamicFor(t, s).Resource(schema.GroupVersionResource{
		Group:    widgets.Group,
		Version:  "v2",
		Resource: "widgets",
	}).Namespace("default")
	for i := range 20 {
		if _, err := v1.Create(ctx, widget("v1", fmt.Sprintf("w%02d", i),
			map[string]any{"hostPort": fmt.Sprintf("host%d:80", i%2)}), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	before := hook.calls.Load()
	list, err := v2.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 20 || list.Items[1].Object["spec"].(map[string]any)["host"] != "host1" {
		t.Fatalf("in v2: %v %v", list, err)
	}
	if n := hook.calls.Load() - before; n != 1 {
		t.Errorf("one list called the webhook %d times", n)
	}
	if list, err = v2.List(ctx, metav1.ListOptions{FieldSelector: "spec.host=host1"}); err != nil ||
		len(list.Items) != 10 {
		t.Errorf("selected in v2: %v %v", list, err)
	}
	w, err := v2.Watch(ctx, metav1.ListOptions{
		ResourceVersion: list.GetResourceVersion(),
		FieldSelector:   "spec.host=host9",
	})
	if err != nil {
		t.Fatal(err)
	}
	patch := func(spec string) {
		if _, err := v1.Patch(ctx, "w00", types.MergePatchType, []byte(`{"spec":{"hostPort":"`+spec+`"}}`),
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	patch("host9:1")
	patch("host9:2")
	patch("host3:2")
	var received []string
	for range 3 {
		e := next(t, w)
		received = append(received, string(e.Type)+" "+fmt.Sprint(e.Object.(*unstructured.Unstructured).Object["spec"]))
	}
	if want := []string{"ADDED map[host:host9 port:1 replicas:1]",
		"MODIFIED map[host:host9 port:2 replicas:1]"}; !slices.Equal(received[:2], want) ||
		!strings.HasPrefix(received[2], "DELETED") {
		t.Errorf("received %v", received)
	}
	// Objects stored in v1 are read in v1 without the webhook, even if it fails.
	hook.fail.Store(true)
	if list, err = v1.List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 20 {
		t.Errorf("%v %v", list, err)
	}
	if _, err = v2.Get(ctx, "w01", metav1.GetOptions{}); err == nil || !strings.Contains(err.Error(), "no way") {
		t.Errorf("a conversion that fails: %v", err)
	}
	open, err := v2.Watch(ctx, metav1.ListOptions{ResourceVersion: list.GetResourceVersion()})
	if err != nil {
		t.Fatal(err)
	}
	patch("host9:3")
	resumed, err := v2.Watch(ctx, metav1.ListOptions{ResourceVersion: list.GetResourceVersion()})
	if err != nil {
		t.Fatal(err)
	}
	for _, failing := range []watch.Interface{open, resumed} {
		e := next(t, failing)
		if s, ok := e.Object.(*metav1.Status); !ok || e.Type != watch.Error || s.Code != 500 ||
			!strings.Contains(s.Message, "no way") {
			t.Errorf("a watch whose conversion fails: %v %v", e.Type, e.Object)
		}
	}
	hook.fail.Store(false)
	release := make(chan struct{})
	hook.hang.Store(&release)
	hung := make(chan error, 1)
	go func() {
		for {
			_, err := v2.Get(ctx, "w03", metav1.GetOptions{})
			select {
			case <-release:
				hung <- err
				return
			default: // the next steps have taken longer than the 30 s of a conversion
			}
		}
	}()
	w1, err := v1.Watch(ctx, metav1.ListOptions{ResourceVersion: list.GetResourceVersion()})
	if err != nil {
		t.Fatal(err)
	}
	patch("host7:7")
	if e := next(t, w1); e.Type != watch.Modified {
		t.Errorf("%v", e)
	}
	s.Kubectl("create", "configmap", "unharmed")
	close(release)
	if err := <-hung; err != nil {
		t.Errorf("after it answered: %v", err)
	}
}
