package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

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
	s.Kubectl("wait", "--timeout=2m", "--for=jsonpath={.status.acceptedNames.kind}=Widget",
		"crd/widgets.e2e.example.com")
	s.Kubectl("wait", "--timeout=2m", "--for=condition=Established", "crd/widgets.e2e.example.com")
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
		case <-time.After(harness.Soon):
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
	t.Parallel()
	for name, start := range map[string]func(testing.TB, string, ...string) *harness.Server{
		"up":      harness.Up,
		"split":   harness.Split,
		"compact": harness.Compact,
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
			// The watch ends once its gateway serves the new CRD.
			if list, err := c.List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 1 ||
				list.Items[0].Object["added"] != "new" {
				t.Errorf("without the new default: %v %v", list, err)
			}
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
