package e2e

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

var widgets = schema.GroupVersionResource{Group: "e2e.example.com", Version: "v1", Resource: "widgets"}

// large is an integer that a float64 cannot represent exactly.
const large = 1759900000123456789

// widgetsDefinition returns the manifest of a CRD with two versions. conversion becomes its spec.conversion.
func widgetsDefinition(conversion string) string {
	return fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.e2e.example.com}
spec:
  group: e2e.example.com
  scope: Namespaced
  names: {plural: widgets, singular: widget, kind: Widget, shortNames: [wd]}
  conversion: %s
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}, scale: {specReplicasPath: .spec.replicas, statusReplicasPath: .status.replicas}}
    selectableFields: [{jsonPath: .spec.hostPort}]
    additionalPrinterColumns: [{name: Replicas, type: integer, jsonPath: .spec.replicas}]
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties: {hostPort: {type: string}, replicas: {type: integer, default: 1, maximum: 5}, large: {type: integer}}
            x-kubernetes-validations: [{rule: "self.replicas != 4", message: "not four"}]
          status: {type: object, properties: {replicas: {type: integer}}}
  - name: v2
    served: true
    storage: false
    selectableFields: [{jsonPath: .spec.host}]
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec: {type: object, properties: {host: {type: string}, port: {type: string}, hostPort: {type: string}, replicas: {type: integer}, large: {type: integer}}}
          status: {type: object, properties: {replicas: {type: integer}}}
`, conversion)
}

func define(t *testing.T, s *harness.Server, definition string) {
	t.Helper()
	s.Apply(definition)
	// The CRD's conditions are null until its names are accepted. kubectl wait fails on a null condition at once, with
	// either server.
	s.Kubectl("wait", "--for=jsonpath={.status.acceptedNames.kind}=Widget", "crd/widgets.e2e.example.com")
	s.Kubectl("wait", "--for=condition=Established", "crd/widgets.e2e.example.com")
	// One gateway reports Established; another may serve the resource a moment later (docs/operators/compatibility.md).
	conf, err := rest.TLSConfigFor(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}}
	harness.Eventually(t, 10*time.Second, func() error {
		for range 10 { // each request has its own connection, so both gateways of split get some
			resp, err := client.Get(s.Config().Host + "/apis/e2e.example.com/v1/widgets")
			if err != nil {
				return err
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return errors.New(resp.Status)
			}
		}
		return nil
	})
}

func widget(version, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "e2e.example.com/" + version,
		"kind":       "Widget",
		"metadata":   map[string]any{"name": name},
		"spec":       spec,
	}}
}

func dynamicFor(t *testing.T, s *harness.Server) dynamic.Interface {
	c, err := dynamic.NewForConfig(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// next returns a watch's next event that is not a bookmark.
func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				return watch.Event{}
			}
			if e.Type != watch.Bookmark {
				return e
			}
		case <-time.After(20 * time.Second):
			t.Fatal("no event")
		}
	}
}

// TestCustomResources checks that both `up` and `split` serve custom resources:
//
//   - Objects are validated, pruned, defaulted, scaled, selected and watched.
//   - A changed CRD ends its watches, and reads then apply the new defaults.
//   - Deleting the CRD deletes its objects.
func TestCustomResources(t *testing.T) {
	for name, start := range map[string]func(testing.TB, string, ...string) *harness.Server{
		"up":    harness.Up,
		"split": harness.Split,
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, "")
			ctx := t.Context()
			define(t, s, widgetsDefinition("{strategy: None}"))
			c := dynamicFor(t, s).Resource(widgets).Namespace("default")
			a, err := c.Create(ctx, widget("v1", "a", map[string]any{
				"hostPort": "h:1",
				"unknown":  "x",
				"large":    int64(large),
			}), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			spec := a.Object["spec"].(map[string]any)
			if spec["unknown"] != nil || spec["replicas"] != int64(1) || spec["large"] != int64(large) {
				t.Errorf("not pruned or without its default: %v", spec)
			}
			w, err := c.Watch(ctx, metav1.ListOptions{ResourceVersion: a.GetResourceVersion()})
			if err != nil {
				t.Fatal(err)
			}
			selected, err := c.Watch(ctx, metav1.ListOptions{
				ResourceVersion: a.GetResourceVersion(),
				FieldSelector:   "spec.hostPort=h:2",
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, bad := range []string{`{"spec":{"replicas":6}}`,
				`{"spec":{"replicas":4}}`, `{"spec":{"replicas":"x"}}`} {
				if _, err := c.Patch(ctx, "a", types.MergePatchType, []byte(bad),
					metav1.PatchOptions{}); !apierrors.IsInvalid(err) {
					t.Errorf("%s: %v", bad, err)
				}
			}
			if _, err := c.Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"hostPort":"h:2"}}`),
				metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			if e := next(t, w); e.Type != watch.Modified {
				t.Errorf("%v", e)
			}
			if e := next(t, selected); e.Type != watch.Added {
				t.Errorf("%v", e)
			}
			contains(t, "scale", s.Kubectl("scale", "widgets.v1.e2e.example.com/a", "--replicas=3"), "scaled")
			contains(t, "table", s.Kubectl("get", "widgets.v1.e2e.example.com"), "REPLICAS", "3")
			contains(t, "explain", s.Kubectl("explain", "widget.spec.replicas"), "<integer>")
			other, err := dynamicFor(t, s).Resource(schema.GroupVersionResource{
				Group:    widgets.Group,
				Version:  "v2",
				Resource: "widgets",
			}).Namespace("default").List(ctx, metav1.ListOptions{})
			if err != nil || len(other.Items) != 1 || other.Items[0].GetAPIVersion() != "e2e.example.com/v2" ||
				other.Items[0].Object["spec"].(map[string]any)["large"] != int64(large) {
				t.Errorf("in v2: %v %v", other, err)
			}
			// The CRD changes.
			s.Apply(strings.Replace(widgetsDefinition("{strategy: None}"), "status: {type: object, properties:",
				"added: {type: string, default: new}\n          status: {type: object, properties:", 1))
			for e := (watch.Event{Type: watch.Modified}); e.Type != ""; { // events before the change, then the end
				if e = next(t, w); e.Type == watch.Error {
					t.Errorf("ended with %v", e.Object)
				}
			}
			harness.Eventually(t, 10*time.Second, func() error {
				list, err := c.List(ctx, metav1.ListOptions{})
				if err != nil || len(list.Items) != 1 || list.Items[0].Object["added"] != "new" {
					return fmt.Errorf("without the new default: %v %v", list, err)
				}
				return nil
			})
			// The watch delivers the last event before it ends.
			last, err := c.Watch(ctx, metav1.ListOptions{
				SendInitialEvents:    new(false),
				ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
				AllowWatchBookmarks:  true,
			})
			if err != nil {
				t.Fatal(err)
			}
			s.Kubectl("delete", "crd", "widgets.e2e.example.com")
			if e := next(t, last); e.Type != watch.Deleted {
				t.Errorf("the object's deletion: %v", e)
			}
			for e := (watch.Event{Type: watch.Modified}); e.Type != ""; {
				if e = next(t, last); e.Type == watch.Error {
					t.Errorf("ended with %v", e.Object)
				}
			}
			if _, err := c.List(ctx, metav1.ListOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("still served: %v", err)
			}
			define(t, s, widgetsDefinition("{strategy: None}"))
			if list, err := c.List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
				t.Errorf("objects outlived their definition: %v %v", list, err)
			}
		})
	}
}

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
	return fmt.Sprintf(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {url: "%s/convert", caBundle: %s}}}`, c.URL, ca)
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
	hook.fail.Store(false)
	release := make(chan struct{})
	hook.hang.Store(&release)
	hung := make(chan error, 1)
	go func() {
		_, err := v2.Get(ctx, "w03", metav1.GetOptions{})
		hung <- err
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
