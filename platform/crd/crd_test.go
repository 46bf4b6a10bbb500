package crd

import (
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// widgets returns a CRD that is served in v1 and stored in v2.
func widgets() *apiextensionsv1.CustomResourceDefinition {
	object := func(of map[string]apiextensionsv1.JSONSchemaProps) apiextensionsv1.JSONSchemaProps {
		return apiextensionsv1.JSONSchemaProps{Type: "object", Properties: of}
	}
	version := func(name string, storage bool) apiextensionsv1.CustomResourceDefinitionVersion {
		spec := object(map[string]apiextensionsv1.JSONSchemaProps{
			"size":  {Type: "integer", Default: &apiextensionsv1.JSON{Raw: []byte("3")}},
			"color": {Type: "string"},
		})
		root := object(map[string]apiextensionsv1.JSONSchemaProps{"spec": spec})
		return apiextensionsv1.CustomResourceDefinitionVersion{
			Name:    name,
			Served:  true,
			Storage: storage,
			Schema:  &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &root},
			Subresources: &apiextensionsv1.CustomResourceSubresources{
				Status: &apiextensionsv1.CustomResourceSubresourceStatus{},
				Scale:  &apiextensionsv1.CustomResourceSubresourceScale{},
			},
		}
	}
	names := apiextensionsv1.CustomResourceDefinitionNames{
		Plural:   "widgets",
		Singular: "widget",
		Kind:     "Widget",
		ListKind: "WidgetList",
	}
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "widgets.example.com", UID: "1", Generation: 1},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group:      "example.com",
			Scope:      apiextensionsv1.NamespaceScoped,
			Names:      names,
			Versions:   []apiextensionsv1.CustomResourceDefinitionVersion{version("v1", false), version("v2", true)},
			Conversion: &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.NoneConverter},
		},
		Status: apiextensionsv1.CustomResourceDefinitionStatus{AcceptedNames: names},
	}
}

func define(t *testing.T, change func(*apiextensionsv1.CustomResourceDefinition)) (*CRD, error) {
	t.Helper()
	d := widgets()
	if change != nil {
		change(d)
	}
	return New(d)
}

// New rejects a CRD that cannot be served, with the reason.
func TestInvalidCRDs(t *testing.T) {
	for want, change := range map[string]func(*apiextensionsv1.CustomResourceDefinition){
		"no accepted kind": func(d *apiextensionsv1.CustomResourceDefinition) { d.Status.AcceptedNames.Kind = "" },
		`accepted plural "roles"`: func(d *apiextensionsv1.CustomResourceDefinition) {
			d.Status.AcceptedNames.Plural = "roles"
		},
		"no storage version": func(d *apiextensionsv1.CustomResourceDefinition) {
			d.Spec.Versions[1].Storage = false
		},
	} {
		if _, err := define(t, change); err == nil || !strings.Contains(strings.ToLower(err.Error()), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// A schema that is not structural fails at its first use. The error names the CRD and the version.
func TestASchemaThatIsNotStructural(t *testing.T) {
	d, err := define(t, func(d *apiextensionsv1.CustomResourceDefinition) {
		elsewhere := "#/definitions/spec"
		schema := d.Spec.Versions[0].Schema.OpenAPIV3Schema
		schema.Properties["spec"] = apiextensionsv1.JSONSchemaProps{Ref: &elsewhere}
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "the schema of widgets.example.com in v1 is not structural"
	if _, err := d.Structural("v1"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Structural: %v", err)
	}
	if _, err := d.Decode([]byte(body)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Decode: %v", err)
	}
	if s, err := d.Structural("v2"); s == nil || err != nil {
		t.Errorf("another version: %v, %v", s, err)
	}
	if s, err := d.Structural("v3"); s != nil || err != nil {
		t.Errorf("an unknown version: %v, %v", s, err)
	}
}

// Same is true until the generation or the accepted names of the CRD change.
func TestSame(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*apiextensionsv1.CustomResourceDefinition)
		same   bool
	}{
		"nothing":    {func(*apiextensionsv1.CustomResourceDefinition) {}, true},
		"conditions": {func(d *apiextensionsv1.CustomResourceDefinition) { d.ResourceVersion = "9" }, true},
		"the spec":   {func(d *apiextensionsv1.CustomResourceDefinition) { d.Generation++ }, false},
		"recreated": {func(d *apiextensionsv1.CustomResourceDefinition) {
			d.UID = "2"
		}, false},
		"short names": {func(d *apiextensionsv1.CustomResourceDefinition) {
			d.Status.AcceptedNames.ShortNames = []string{"w"}
		}, false},
	} {
		b := widgets()
		c.change(b)
		if got := Same(widgets(), b); got != c.same {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func codec(t *testing.T, d *CRD) (runtime.NegotiatedSerializer, runtime.ObjectConvertor) {
	t.Helper()
	c, err := d.Converter(NewConverters(nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	safe, unsafe := c.WithContext(t.Context())
	return d.Serializer(Typer(d.Parameters("v1")), safe), unsafe
}

const body = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a"},` +
	`"spec":{"color":null,"other":1}}`

// Objects of clients are pruned and defaulted. Strict decoding names the pruned fields.
func TestRequestsAreCoerced(t *testing.T) {
	d, err := define(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	s, _ := codec(t, d)
	media, _ := runtime.SerializerInfoForMediaType(s.SupportedMediaTypes(), runtime.ContentTypeJSON)
	read := func(serializer runtime.Serializer) (*unstructured.Unstructured, error) {
		obj, _, err := s.DecoderToVersion(serializer, schema.GroupVersion{Group: "example.com", Version: "v1"}).
			Decode([]byte(body), nil, &unstructured.Unstructured{})
		u, _ := obj.(*unstructured.Unstructured)
		return u, err
	}
	u, err := read(media.Serializer)
	if err != nil {
		t.Fatal(err)
	}
	spec, _, _ := unstructured.NestedMap(u.Object, "spec")
	if len(spec) != 1 || spec["size"] != int64(3) {
		t.Errorf("%v", spec)
	}
	_, err = read(media.StrictSerializer)
	if strict, ok := runtime.AsStrictDecodingError(err); !ok || len(strict.Errors()) != 1 ||
		strict.Errors()[0].Error() != `unknown field "spec.other"` {
		t.Errorf("%v", err)
	}
	for _, m := range s.SupportedMediaTypes() {
		var out strings.Builder
		if err := s.EncoderForVersion(m.Serializer, schema.GroupVersion{Group: "example.com", Version: "v1"}).
			Encode(&metav1.Status{Status: "Failure"}, &out); err != nil || out.Len() == 0 {
			t.Errorf("a status in %s: %v", m.MediaType, err)
		}
	}
}

// Objects of etcd are decoded leniently, and are served in any version.
func TestStoredObjectsAreDecoded(t *testing.T) {
	d, err := define(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, converter := codec(t, d)
	stored := strings.Replace(body, `"name":"a"`, `"name":"a","labels":{"a":1}`, 1)
	u, err := d.Decode([]byte(stored))
	if err != nil || u.GetAPIVersion() != "example.com/v1" || u.GetGeneration() != 1 || len(u.GetLabels()) != 0 {
		t.Fatalf("%v, %v", u, err)
	}
	all, err := d.FromStorage(converter, &unstructured.UnstructuredList{
		Object: map[string]any{"apiVersion": "example.com/v1", "kind": "WidgetList"},
		Items:  []unstructured.Unstructured{*u},
	}, schema.GroupVersion{Group: "example.com", Version: "v2"})
	if err != nil || len(all.Items) != 1 || all.Items[0].GetAPIVersion() != "example.com/v2" {
		t.Errorf("%v, %v", all, err)
	}
	c := d.StorageCodec("v1", converter)
	written, err := runtime.Encode(c, u)
	if err != nil || !strings.Contains(string(written), `"example.com/v2"`) {
		t.Errorf("%s, %v", written, err)
	}
	back, err := runtime.Decode(c, written)
	if err != nil || back.GetObjectKind().GroupVersionKind().Version != "v1" {
		t.Errorf("%v, %v", back, err)
	}
	if _, err := d.Decode([]byte(`{"kind":"Widget"`)); err == nil {
		t.Error("half an object is read")
	}
}

func TestCRDNames(t *testing.T) {
	d, err := define(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !d.Namespaced() || d.UsesWebhook() || d.StorageVersion != "v2" ||
		d.GroupKind().String() != "Widget.example.com" {
		t.Errorf("%+v", d)
	}
	e := d.Equivalents()
	if got := e.EquivalentResourcesFor(d.Resource("v1"), ""); !slices.Contains(got, d.Resource("v2")) {
		t.Errorf("%v", got)
	}
	if k := e.KindFor(d.Resource("v1"), "scale"); k.Kind != "Scale" {
		t.Errorf("%v", k)
	}
	if k := e.KindFor(d.Resource("v2"), "status"); k != d.Kind("v2") {
		t.Errorf("%v", k)
	}
}
