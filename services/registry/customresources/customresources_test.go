package customresources_test

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/validation/spec"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/internal/fixture"
)

const widgetCRD = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"widgets.example.com"},"spec":{"group":"example.com","scope":"Namespaced",
"names":{"plural":"widgets","singular":"widget","kind":"Widget","listKind":"WidgetList"},
"versions":[{"name":"v1","served":true,"storage":true,"subresources":{"status":{}},
"schema":{"openAPIV3Schema":{"type":"object","properties":{
"spec":{"type":"object","properties":{"size":{"type":"integer","default":1,"maximum":5},"odd":{"type":"boolean"}},
"x-kubernetes-validations":[{"rule":"self.size != 4","message":"not four"}]},
"status":{"type":"object","properties":{"seen":{"type":"boolean"}}}}}}}]}}`

var (
	crdsResource = &commonv1.Resource{
		Group:    "apiextensions.k8s.io",
		Version:  "v1",
		Resource: "customresourcedefinitions",
	}
	widgets = &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

// establishedCRD returns a fixture with an established CRD.
func establishedCRD(t *testing.T) *fixture.Fixture {
	t.Helper()
	fx := fixture.New(t)
	fx.Resources.Custom.Handler().OnAdd(fx.Establish(t, widgetCRD), true)
	return fx
}

// A custom resource is served with the verbs of built-in resources. It is defaulted, pruned and validated by its schema
// and CEL, and has a status subresource.
func TestCustomResource(t *testing.T) {
	fx := establishedCRD(t)
	types := map[string]string{"patch": "application/merge-patch+json"}
	write := func(verb, name, sub, body string) (string, error) {
		resource := &commonv1.Resource{
			Group:       widgets.Group,
			Version:     widgets.Version,
			Resource:    widgets.Resource,
			Subresource: sub,
		}
		resp, err := fx.Write(t.Context(), resource, &registryv1.WriteRequest{
			Verb:        verb,
			Name:        name,
			ContentType: types[verb],
			Body:        []byte(body),
		}, &fixture.Callbacks{})
		return string(resp.GetBody()), err
	}
	widget := func(rest string) string {
		return `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a"},` + rest + `}`
	}
	body, err := write("create", "", "", widget(`"spec":{"odd":true,"unknown":1},"status":{"seen":true}`))
	if err != nil || !strings.Contains(body, `"size":1`) || strings.Contains(body, "unknown") ||
		strings.Contains(body, "seen") {
		t.Errorf("%v: %s", err, body)
	}
	for rest, want := range map[string]string{
		`"spec":{"size":9}`:   "should be less than or equal to 5",
		`"spec":{"size":4}`:   "not four",
		`"spec":{"size":"x"}`: `must be of type integer: "string"`,
	} {
		if _, err := write("patch", "a", "", "{"+rest+"}"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", rest, err)
		}
	}
	if body, err = write("patch", "a", "status", `{"spec":{"size":3},"status":{"seen":true}}`); err != nil ||
		!strings.Contains(body, `"seen":true`) ||
		strings.Contains(body, `"size":3`) {
		t.Errorf("status: %v: %s", err, body)
	}
	list, err := fx.List(t.Context(), widgets, &registryv1.GetRequest{})
	if err != nil || !strings.Contains(string(list), `"kind":"WidgetList"`) ||
		!strings.Contains(string(list), `"name":"a"`) {
		t.Errorf("%v: %s", err, list)
	}
}

// Objects of a CRD whose schema is not structural get an internal error, as in kube-apiserver. Others are served.
func TestASchemaThatIsNotStructural(t *testing.T) {
	fx := fixture.New(t)
	d := fx.Establish(t, widgetCRD).DeepCopy()
	d.ResourceVersion += "0"
	elsewhere := "#/definitions/spec"
	d.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"] = apiextensionsv1.JSONSchemaProps{Ref: &elsewhere}
	fx.Resources.Custom.Handler().OnAdd(d, true)
	_, err := fx.List(t.Context(), widgets, &registryv1.GetRequest{})
	if err == nil || !strings.Contains(err.Error(), "error resolving resource") {
		t.Errorf("a list of its objects: %v", err)
	}
	if _, err := fx.List(t.Context(), crdsResource, &registryv1.GetRequest{}); err != nil {
		t.Errorf("a list of CRDs: %v", err)
	}
	if _, err := fx.Resources.Custom.OpenAPIV3(t.Context(), schema.GroupVersion{Group: widgets.Group,
		Version: widgets.Version}); err != nil {
		t.Errorf("its OpenAPI document: %v", err)
	}
}

// The schema of an update applies to the next request, before the informer of CRDs receives the update.
func TestAnUpdatedSchemaAppliesAtOnce(t *testing.T) {
	fx := establishedCRD(t)
	const nine = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a"},"spec":{"size":9}}`
	create := &registryv1.WriteRequest{Verb: "create", Body: []byte(nine)}
	if _, err := fx.Write(t.Context(), widgets, create, &fixture.Callbacks{}); err == nil {
		t.Error("an object above the maximum is created")
	}
	const maximum = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/size/maximum"
	if _, err := fx.Write(t.Context(), crdsResource, &registryv1.WriteRequest{
		Verb:        "patch",
		Name:        "widgets.example.com",
		ContentType: "application/json-patch+json",
		Body:        []byte(`[{"op":"replace","path":"` + maximum + `","value":10}]`),
	}, &fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
	if _, err := fx.Write(t.Context(), widgets, create, &fixture.Callbacks{}); err != nil {
		t.Error(err)
	}
}

// A CRD in a built-in group is not served, as in kube-apiserver, also in a version that is not built in.
func TestABuiltInGroupHidesACRD(t *testing.T) {
	fx := establishedCRD(t)
	crd, err := customresources.ReadCRD(t.Context(), fx.Resources.Storage, "widgets.example.com")
	if err != nil {
		t.Fatal(err)
	}
	crd.Name, crd.Spec.Group, crd.ResourceVersion = "widgets.networking.k8s.io", "networking.k8s.io", "1000000"
	crd.Spec.Versions[0].Name, crd.Status.StoredVersions = "v9", []string{"v9"}
	fx.Resources.Custom.Handler().OnAdd(crd, false)
	for _, e := range fx.Resources.Custom.APIResources() {
		if e.Resource.Group == "networking.k8s.io" {
			t.Errorf("%v is listed", e.Resource)
		}
	}
	hidden := &commonv1.Resource{Group: "networking.k8s.io", Version: "v9", Resource: "widgets"}
	if scope, _, err := fx.Resources.Custom.RequestScope(t.Context(), hidden); err != nil || scope != nil {
		t.Errorf("the custom resource is served (%v)", err)
	}
}

// A CRD with the name of a built-in resource does not reset the resource. It ended the watches of Roles, and its
// objects were events of Roles.
func TestACRDIsNotABuiltInResource(t *testing.T) {
	fx := establishedCRD(t)
	crd, err := customresources.ReadCRD(t.Context(), fx.Resources.Storage, "widgets.example.com")
	if err != nil {
		t.Fatal(err)
	}
	crds, err := customresources.CRDsAt(t.Context(), fx.Resources.Storage, fx.Resources.Storage.Etcds()[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(name, group string, generation int64, deleted bool) string {
		d := crd.DeepCopy()
		d.Name, d.Spec.Group, d.Generation = name+"."+group, group, generation
		d.Spec.Names.Plural, d.Status.AcceptedNames.Plural = name, name
		internal := &apiextensions.CustomResourceDefinition{}
		if err := apiextensionsapiserver.Scheme.Convert(d, internal, nil); err != nil {
			t.Fatal(err)
		}
		return crds.Apply(internal, deleted)
	}
	for _, c := range []struct{ name, group, resource string }{
		{"roles", "rbac.authorization.k8s.io", ""},
		{"things", "example.com", "things.example.com"},
	} {
		apply(c.name, c.group, 1, false)
		if got := apply(c.name, c.group, 2, false); got != c.resource {
			t.Errorf("the change of %s.%s resets %q", c.name, c.group, got)
		}
		_, ok := crds.ByKey("/registry/"+c.group+"/"+c.name+"/default/a", "/registry/")
		if ok != (c.resource != "") {
			t.Errorf("objects of %s.%s have a resource: %v", c.name, c.group, ok)
		}
		if got := apply(c.name, c.group, 2, true); got != c.resource {
			t.Errorf("the deletion of %s.%s resets %q", c.name, c.group, got)
		}
	}
}

// A CRD has discovery entries for the gateway and the watch tier, and a stored resource.
func TestAPIResources(t *testing.T) {
	fx := establishedCRD(t)
	apiResources := fx.Resources.Custom.APIResources()
	if len(apiResources) != 2 || apiResources[0].StorageResource != "widgets.example.com" ||
		!apiResources[0].Unstructured || apiResources[0].NotEstablished ||
		apiResources[1].Resource.Subresource != "status" {
		t.Fatalf("%v", apiResources)
	}
	st, err := fx.Resources.StorageResource(t.Context(), "widgets.example.com")
	if err != nil || st.Prefix != "/registry/example.com/widgets/" {
		t.Errorf("%v, %v", st, err)
	}
	if _, err := fx.Resources.StorageResource(t.Context(), "nones.example.com"); err == nil {
		t.Error("an undefined resource is stored")
	}
}

// A storage version that is not served has no hash in discovery.
func TestAnUnservedStorageVersionHasNoHash(t *testing.T) {
	for served, hashed := range map[string]bool{`"served":true`: true, `"served":false`: false} {
		fx := fixture.New(t)
		definition := strings.Replace(widgetCRD, `"served":true`, served, 1)
		definition = strings.Replace(definition, `"versions":[`, `"versions":[{"name":"v2","served":true,"storage":false,`+
			`"schema":{"openAPIV3Schema":{"type":"object"}}},`, 1)
		fx.Resources.Custom.Handler().OnAdd(fx.Establish(t, definition), true)
		e := fx.Resources.Custom.APIResources()[0]
		if e.Resource.Version != "v2" || (e.StorageVersionHash != "") != hashed {
			t.Errorf("%s: %v", served, e)
		}
	}
}

// An older state does not replace a CRD, unless etcd was restored from a backup. After a restore, any state in etcd is
// valid, even at a lower revision. Entries of equal content have equal digests.
func TestRestoredEtcdSetsCRDsBack(t *testing.T) {
	fx := establishedCRD(t)
	apiResource := func() *registryv1.APIResource { return fx.Resources.Custom.APIResources()[0] }
	before := apiResource()
	if before.CrdRevision == 0 || before.Digest == 0 {
		t.Fatalf("%+v", before)
	}
	older := &apiextensionsv1.CustomResourceDefinition{}
	data, err := fx.Resources.Storage.Client.Client.Get(t.Context(),
		fx.Resources.Storage.Prefix()+"apiextensions.k8s.io/customresourcedefinitions/widgets.example.com")
	if err != nil || len(data.Kvs) != 1 {
		t.Fatalf("%v, %v", data, err)
	}
	if err := json.Unmarshal(data.Kvs[0].Value, older); err != nil {
		t.Fatal(err)
	}
	older.ResourceVersion = "1"
	h := fx.Resources.Custom.Handler()
	h.OnUpdate(nil, older)
	if got := apiResource(); got.CrdRevision != before.CrdRevision {
		t.Errorf("an older state replaced the CRD: revision %d", got.CrdRevision)
	}
	fx.Resources.Custom.EpochChanged()
	h.OnUpdate(nil, older)
	if got := apiResource(); got.CrdRevision != 1 || got.Digest != before.Digest {
		t.Errorf("at %d with digest %x, before at %d with %x", got.CrdRevision, got.Digest, before.CrdRevision,
			before.Digest)
	}
	// The backup is older than the CRD: a list does not contain the CRD, and then the CRD is created again.
	newer := older.DeepCopy()
	newer.ResourceVersion = "5000"
	h.OnUpdate(nil, newer)
	fx.Resources.Custom.EpochChanged()
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: newer.Name, Obj: newer})
	if n := len(fx.Resources.Custom.APIResources()); n != 0 {
		t.Errorf("%d entries of a deleted CRD", n)
	}
	again := older.DeepCopy()
	again.ResourceVersion = "2600"
	h.OnAdd(again, false)
	if n := len(fx.Resources.Custom.APIResources()); n == 0 {
		t.Error("a recreated CRD is not served")
	}
	h.OnDelete(again)
	h.OnAdd(older, false)
	if n := len(fx.Resources.Custom.APIResources()); n != 0 {
		t.Errorf("a state from before the deletion restored %d entries", n)
	}
}

// OpenAPI documents are not built or merged for a request that has ended.
func TestDocumentsEndWithTheirRequest(t *testing.T) {
	custom := establishedCRD(t).Resources.Custom
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := custom.OpenAPIV2(ctx, &spec.Swagger{}); !errors.Is(err, context.Canceled) {
		t.Errorf("v2: %v", err)
	}
	gv := schema.GroupVersion{Group: widgets.Group, Version: widgets.Version}
	if _, err := custom.OpenAPIV3(ctx, gv); !errors.Is(err, context.Canceled) {
		t.Errorf("v3: %v", err)
	}
}

// The finalizer lists and deletes the objects of a CRD that is being deleted. A CRD without objects builds no storage
// for it.
func TestTheFinalizerDeletesObjects(t *testing.T) {
	fx := establishedCRD(t)
	stored, err := customresources.ReadCRD(t.Context(), fx.Resources.Custom.Storage, "widgets.example.com")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := fx.Resources.Custom.GetCustomResourceListerCollectionDeleter(stored)
	if err != nil {
		t.Fatal(err)
	}
	expect := func(want int) {
		t.Helper()
		list, err := objects.List(request.WithNamespace(t.Context(), ""), nil)
		if err != nil || meta.LenList(list) != want {
			t.Errorf("%d objects, not %d: %v", meta.LenList(list), want, err)
		}
	}
	expect(0)
	if fx.Resources.Custom.Built(stored.Name) {
		t.Error("the storages are built without an object")
	}
	if _, err := fx.Write(t.Context(), widgets, &registryv1.WriteRequest{
		Verb: "create",
		Body: []byte(`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a"}}`),
	}, &fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
	expect(1)
	ctx := request.WithNamespace(t.Context(), "x") // the fixture's namespace
	if _, err := objects.DeleteCollection(ctx, rest.ValidateAllObjectFunc, nil, nil); err != nil {
		t.Error(err)
	}
	expect(0)
}

// The hash of a group version's document changes with a CRD's generation and accepted names, and not with its
// conditions.
func TestHashesFollowTheInputsOfDocuments(t *testing.T) {
	custom := establishedCRD(t).Resources.Custom
	d, err := customresources.ReadCRD(t.Context(), custom.Storage, "widgets.example.com")
	if err != nil {
		t.Fatal(err)
	}
	gv := schema.GroupVersion{Group: widgets.Group, Version: widgets.Version}
	revision, err := strconv.Atoi(d.ResourceVersion)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		change  func(*apiextensionsv1.CustomResourceDefinition)
		changed bool
	}{
		{"condition", func(d *apiextensionsv1.CustomResourceDefinition) {
			d.Status.Conditions[0].Message = "other"
		}, false},
		{"generation", func(d *apiextensionsv1.CustomResourceDefinition) { d.Generation++ }, true},
		{"names", func(d *apiextensionsv1.CustomResourceDefinition) { d.Status.AcceptedNames.Kind = "Other" }, true},
	} {
		before := custom.Hashes()[gv]
		d = d.DeepCopy()
		revision++
		d.ResourceVersion = strconv.Itoa(revision)
		c.change(d)
		custom.Handler().OnUpdate(nil, d)
		if after := custom.Hashes()[gv]; after == "" || (after != before) != c.changed {
			t.Errorf("%s: %q became %q", c.name, before, after)
		}
	}
}
