package handlers_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// object is the part of a response that the tests check.
type object struct {
	Kind     string
	Metadata metav1.ObjectMeta
	Data     map[string]string
	Items    []object
}

func decodeObject(t *testing.T, body []byte) (o object) {
	t.Helper()
	if err := json.Unmarshal(body, &o); err != nil {
		t.Fatalf("%v: %.300s", err, body)
	}
	return o
}

// status formats an API error: its code, reason and message.
func status(err error) string {
	var warned *rpc.WarnedError
	if errors.As(err, &warned) {
		err = warned.Unwrap()
	}
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		return fmt.Sprint(err)
	}
	s := api.Status()
	return fmt.Sprintf("%d %s %s", s.Code, s.Reason, s.Message)
}

// write is a write and its expected response. Without a resource it writes a ConfigMap.
type write struct {
	resource          *commonv1.Resource
	verb, name, query string
	contentType, body string
	userAgent         string
	code              int32
	fails             string // the beginning of the error's status
	check             func(*testing.T, object)
	warns             string
	review            func(registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error)
	reviews           []string
}

func run(t *testing.T, fx *fixture.Fixture, writes ...write) {
	t.Helper()
	last := ""
	for i, x := range writes {
		resource := x.resource
		if resource == nil {
			resource = fixture.ConfigMaps
		}
		callbacks := &fixture.Callbacks{OnReview: x.review}
		resp, err := fx.Write(t.Context(), resource, &registryv1.WriteRequest{
			Verb:        x.verb,
			Name:        x.name,
			Query:       x.query,
			ContentType: x.contentType,
			UserAgent:   x.userAgent,
			Body:        []byte(strings.ReplaceAll(x.body, "{rv}", last)),
		}, callbacks)
		step := fmt.Sprintf("%d: %s %s?%s", i, x.verb, x.name, x.query)
		if x.reviews != nil && !slices.Equal(callbacks.Reviews, x.reviews) {
			t.Errorf("%s made the callbacks %q", step, callbacks.Reviews)
		}
		if err != nil || x.fails != "" {
			if err == nil || !strings.HasPrefix(status(err), x.fails) || x.fails == "" {
				t.Errorf("%s: %s, not %q", step, status(err), x.fails)
			}
			continue
		}
		if resp.Code != x.code {
			t.Errorf("%s: %d, not %d", step, resp.Code, x.code)
		}
		if all := strings.Join(resp.Warnings, "; "); !strings.Contains(all, x.warns) || x.warns == "" && all != "" {
			t.Errorf("%s warns %q", step, all)
		}
		o := decodeObject(t, resp.Body)
		if o.Metadata.ResourceVersion != "" {
			last = o.Metadata.ResourceVersion
		}
		if x.check != nil {
			x.check(t, o)
		}
	}
}

func configMap(name, rest string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q%s}`, name, rest)
}

// copies returns a JSON Patch that adds a value and copies it n times.
func copies(n int, value string) string {
	ops := []string{fmt.Sprintf(`{"op":"add","path":"/data/x","value":%q}`, value)}
	for i := range n {
		ops = append(ops, fmt.Sprintf(`{"op":"copy","from":"/data/x","path":"/data/x%d"}`, i))
	}
	return "[" + strings.Join(ops, ",") + "]"
}

func data(want ...string) func(*testing.T, object) {
	return func(t *testing.T, o object) {
		t.Helper()
		var got []string
		for k, v := range o.Data {
			got = append(got, k+"="+v)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("data is %q, not %q", got, want)
		}
	}
}

// Each verb behaves as in kube-apiserver, and returns kube-apiserver's errors.
func TestWrites(t *testing.T) {
	fx := fixture.New(t)
	const apply, merge = "application/apply-patch+yaml", "application/merge-patch+json"
	const strategic, patch = "application/strategic-merge-patch+json", "application/json-patch+json"
	leases := &commonv1.Resource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
	t.Run("create, update, delete", func(t *testing.T) {
		run(t, fx,
			write{verb: "create", body: configMap("a", `},"data":{"k":"v"}`), code: 201, check: data("k=v")},
			write{verb: "create", body: configMap("a", "}"), fails: `409 AlreadyExists configmaps "a" already exists`},
			write{verb: "update", name: "a", body: configMap("a", `},"data":{"k":"w"}`), code: 200, check: data("k=w")},
			write{verb: "update", name: "a", body: configMap("a", `,"resourceVersion":"1"}`),
				fails: `409 Conflict Operation cannot be fulfilled on configmaps "a"`},
			write{verb: "update", name: "a", body: configMap("b", "}"),
				fails: "400 BadRequest the name of the object (b) does not match the name on the URL (a)"},
			write{
				verb:  "update",
				name:  "none",
				body:  configMap("none", "}"),
				fails: `404 NotFound configmaps "none" not found`,
			},
			write{verb: "update", name: "a", body: configMap("a", `,"uid":"other"}`), fails: "409 Conflict"},
			write{
				verb:  "create",
				body:  `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s"}}`,
				fails: "400 BadRequest",
			},
			write{verb: "create", body: "{", fails: "400 BadRequest"},
			write{
				verb:  "create",
				body:  configMap("Not A Name", "}"),
				fails: "422 Invalid ConfigMap \"Not A Name\" is invalid",
			},
			write{verb: "delete", name: "a", body: `{"preconditions":{"uid":"other"}}`, fails: "409 Conflict"},
			write{verb: "delete", name: "a", code: 200, check: func(t *testing.T, o object) {
				if o.Kind != "Status" {
					t.Errorf("a deletion returned a %s", o.Kind)
				}
			}},
			write{verb: "delete", name: "a", fails: `404 NotFound configmaps "a" not found`},
			write{verb: "shout", name: "a", fails: "405 MethodNotAllowed shout is not supported"},
			write{
				resource: leases,
				verb:     "update",
				name:     "made",
				body: `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease",` +
					`"metadata":{"name":"made"}}`,
				code: 201,
			},
		)
	})
	t.Run("names", func(t *testing.T) {
		run(t, fx,
			write{
				verb: "create",
				body: `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"g-"}}`,
				code: 201,
				check: func(t *testing.T, o object) {
					if !strings.HasPrefix(o.Metadata.Name, "g-") || len(o.Metadata.Name) != 7 {
						t.Errorf("the name is %q", o.Metadata.Name)
					}
				},
			},
			write{verb: "create", body: `{"apiVersion":"v1","kind":"ConfigMap","metadata":{}}`, fails: "422 Invalid"},
			write{verb: "patch", contentType: merge, body: "{}", fails: "400 BadRequest name must be provided"},
		)
	})
	t.Run("options", func(t *testing.T) {
		run(t, fx,
			write{verb: "create", query: "dryRun=All", body: configMap("dry", "}"), code: 201},
			write{verb: "delete", name: "dry", fails: "404 NotFound"},
			write{verb: "create", query: "dryRun=Some", body: configMap("dry", "}"), fails: "422 Invalid"},
			write{
				verb:  "create",
				query: "fieldValidation=Strict",
				body:  configMap("o", `},"dta":{}`),
				fails: `400 BadRequest ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding error: unknown field "dta"`,
			},
			write{verb: "create", query: "fieldValidation=Warn", body: configMap("o", `},"dta":{}`), code: 201,
				warns: `unknown field "dta"`},
			write{
				verb:  "update",
				name:  "o",
				query: "fieldValidation=Ignore",
				body:  configMap("o", `},"dta":{}`),
				code:  200,
			},
			write{
				verb:  "update",
				name:  "o",
				query: "fieldValidation=Loud",
				body:  configMap("o", "}"),
				fails: "422 Invalid",
			},
			write{
				verb:  "update",
				name:  "o",
				query: "fieldManager=" + strings.Repeat("x", 200),
				body:  configMap("o", "}"),
				fails: "422 Invalid",
			},
			write{verb: "delete", name: "o", query: "propagationPolicy=Foreground", code: 200},
			write{verb: "delete", name: "o", query: "propagationPolicy=Sideways", fails: "422 Invalid"},
			write{verb: "delete", name: "o", query: "gracePeriodSeconds=x", fails: "400 BadRequest"},
		)
	})
	t.Run("patches", func(t *testing.T) {
		run(t, fx,
			write{verb: "create", body: configMap("p", `},"data":{"a":"1","b":"2"}`), code: 201},
			write{
				verb:        "patch",
				name:        "p",
				contentType: merge,
				body:        `{"data":{"a":null,"c":"3"}}`,
				code:        200,
				check:       data("b=2", "c=3"),
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: patch,
				body:        `[{"op":"replace","path":"/data/b","value":"4"}]`,
				code:        200,
				check:       data("b=4", "c=3"),
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: patch,
				body:        `[{"op":"test","path":"/data/b","value":"no"}]`,
				fails:       "422 Invalid",
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: patch,
				body:        `[{"op":"remove","path":"/data/none"}]`,
				fails:       "422 Invalid",
			},
			write{verb: "patch", name: "p", contentType: patch, body: "{}", fails: "400 BadRequest"},
			write{
				verb:        "patch",
				name:        "p",
				contentType: patch,
				body: "[" + strings.Repeat(`{"op":"test","path":"/kind","value":"ConfigMap"},`, 10001) +
					`{"op":"test","path":"/kind","value":"ConfigMap"}]`,
				fails: "413 RequestEntityTooLarge",
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: patch,
				body:        copies(9000, strings.Repeat("v", 1000)),
				fails:       "422 Invalid the server rejected our request due to an error in our request",
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: strategic,
				body:        `{"data":{"d":"5"}}`,
				code:        200,
				check:       data("b=4", "c=3", "d=5"),
			},
			write{
				verb:        "patch",
				name:        "p",
				contentType: strategic,
				body:        `{"metadata":{"resourceVersion":"1"}}`,
				fails:       "409 Conflict",
			},
			write{verb: "patch", name: "p", contentType: "text/plain", body: "{}", fails: "415 UnsupportedMediaType"},
			write{verb: "patch", name: "none", contentType: merge, body: "{}", fails: "404 NotFound"},
			write{verb: "patch", name: "p", query: "force=true", contentType: merge, body: "{}", fails: "422 Invalid"},
			write{verb: "patch", name: "made", query: "fieldManager=me", contentType: apply,
				body: configMap("made", `},"data":{"a":"1"}`), code: 201, check: data("a=1")},
			write{
				verb:        "patch",
				name:        "made",
				contentType: apply,
				body:        configMap("made", "}"),
				fails:       "422 Invalid",
			}, // no manager
		)
	})
}

func managers(o object) (all []string) {
	for _, m := range o.Metadata.ManagedFields {
		all = append(all, fmt.Sprintf("%s %s %s", m.Manager, m.Operation, m.FieldsV1.GetRawString()))
	}
	slices.Sort(all)
	return all
}

// managedFields records each manager's fields. Only a forced apply takes a field from another manager.
func TestManagedFields(t *testing.T) {
	fx := fixture.New(t)
	const apply = "application/apply-patch+yaml"
	managed := func(want ...string) func(*testing.T, object) {
		return func(t *testing.T, o object) {
			t.Helper()
			if got := managers(o); !slices.Equal(got, want) {
				t.Errorf("%q, not %q", got, want)
			}
		}
	}
	run(t, fx,
		write{verb: "create", userAgent: "kubectl/v1.36 (linux)", body: configMap("m", `},"data":{"a":"1"}`), code: 201,
			check: managed(`kubectl Update {"f:data":{".":{},"f:a":{}}}`)},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=one",
			contentType: apply,
			body:        configMap("m", `},"data":{"a":"2"}`),
			fails:       `409 Conflict Apply failed with 1 conflict: conflict with "kubectl" using v1: .data.a`,
		},
		write{verb: "patch", name: "m", query: "fieldManager=one&force=true", contentType: apply,
			body: configMap("m", `},"data":{"a":"2"}`), code: 200,
			check: managed(`kubectl Update {"f:data":{}}`, `one Apply {"f:data":{"f:a":{}}}`)},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=two",
			contentType: apply,
			body:        configMap("m", `},"data":{"b":"3"}`),
			code:        200,
			check:       data("a=2", "b=3"),
		},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=one",
			contentType: apply,
			body:        configMap("m", "}"),
			code:        200,
			check:       data("b=3"),
		}, // a field that its manager no longer applies is removed
	)
	// An object that is too large with its managedFields is stored without them.
	keys := map[string]string{}
	for i := range 22000 {
		keys[fmt.Sprintf("key-%032d", i)] = ""
	}
	large, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	run(t, fx, write{verb: "create", body: configMap("large", `},"data":`+string(large)), code: 201,
		check: func(t *testing.T, o object) {
			if len(o.Data) != len(keys) || len(o.Metadata.ManagedFields) != 0 {
				t.Errorf("%d keys, %d managers", len(o.Data), len(o.Metadata.ManagedFields))
			}
		}})
}

// A write calls both admission phases. Admission can change the object and can reject the write.
func TestAdmissionCallbacks(t *testing.T) {
	fx := fixture.New(t)
	both := func(operation string) []string {
		return []string{"ADMIT " + operation, "VALIDATE " + operation}
	}
	refuse := func(phase registryv1.Phase) func(registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
		return func(p registryv1.Phase, _ *admissionv1.Review) (*admissionv1.Verdict, error) {
			if p == phase {
				return nil, apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"},
					"a", errors.New("not today"))
			}
			return &admissionv1.Verdict{Warnings: []string{"think twice"}}, nil
		}
	}
	change := func(p registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
		if p != registryv1.Phase_PHASE_ADMIT {
			return &admissionv1.Verdict{}, nil
		}
		return &admissionv1.Verdict{Object: []byte(strings.Replace(string(r.Object), "plain", "fancy", 1))}, nil
	}
	body := configMap("a", `},"data":{"k":"plain"}`)
	run(t, fx,
		write{
			verb:   "create",
			body:   body,
			review: refuse(registryv1.Phase_PHASE_ADMIT),
			fails:  `403 Forbidden configmaps "a" is forbidden: not today`,
		},
		write{verb: "create", body: body, review: refuse(registryv1.Phase_PHASE_VALIDATE), fails: `403 Forbidden`},
		write{verb: "delete", name: "a", fails: "404 NotFound"}, // nothing was written
		write{verb: "create", body: body, review: change, code: 201, check: data("k=fancy"), reviews: both("CREATE")},
		write{verb: "update", name: "a", body: body, code: 200, check: data("k=plain"), reviews: both("UPDATE")},
		write{verb: "delete", name: "a", review: refuse(registryv1.Phase_PHASE_VALIDATE), fails: "403 Forbidden"},
		write{verb: "delete", name: "a", code: 200},
	)
}

// An object that was validated in the admit phase is not reviewed again. Any other object is.
func TestValidateInAdmit(t *testing.T) {
	fx := fixture.New(t)
	pods := &commonv1.Resource{Version: "v1", Resource: "pods"}
	const generated = `"generateName":"p-"`
	for name, c := range map[string]struct {
		validated bool
		atOnce    []admissionv1.Operation
		asks      string
	}{
		"validated":     {true, fixture.Operations, "ADMIT CREATE"},
		"not validated": {false, fixture.Operations, "ADMIT CREATE, VALIDATE CREATE"},
		"not requested": {true, nil, "ADMIT CREATE, VALIDATE CREATE"},
	} {
		callbacks := &fixture.Callbacks{
			OnReview: func(p registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
				if r.Validate != (p == registryv1.Phase_PHASE_ADMIT && c.atOnce != nil) {
					t.Errorf("%s: %v has Validate %v", name, p, r.Validate)
				}
				return &admissionv1.Verdict{Validated: c.validated}, nil
			},
		}
		_, err := fx.Write(t.Context(), pods, &registryv1.WriteRequest{
			Verb: "create",
			Body: []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{` + generated +
				`},"spec":{"containers":[{"name":"c","image":"i"}]}}`),
			ValidateInAdmit: c.atOnce,
		}, callbacks)
		if got := strings.Join(callbacks.Reviews, ", "); err != nil || got != c.asks {
			t.Errorf("%s: callbacks %s, error %v", name, got, err)
		}
	}
}

// deletecollection deletes each object that the options select.
func TestDeleteCollection(t *testing.T) {
	fx := fixture.New(t)
	var made []write
	for i := range 6 {
		made = append(made, write{
			verb: "create",
			body: configMap(fmt.Sprint("c", i), fmt.Sprintf(`,"labels":{"odd":"%v"}}`, i%2 == 1)),
			code: 201,
		})
	}
	run(t, fx, made...)
	names := func() (all []string) {
		body, err := fx.List(t.Context(), fixture.ConfigMaps, &registryv1.GetRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range decodeObject(t, body).Items {
			all = append(all, o.Metadata.Name)
		}
		return all
	}
	run(t, fx,
		write{verb: "deletecollection", query: "labelSelector=odd%3Dtrue&dryRun=All", code: 200},
		write{verb: "deletecollection", query: "labelSelector=odd%3D%3D%3D", fails: "400 BadRequest"},
	)
	if got := names(); len(got) != 6 {
		t.Errorf("%q are left", got)
	}
	run(t, fx, write{verb: "deletecollection", query: "labelSelector=odd%3Dtrue", code: 200})
	if got := names(); !slices.Equal(got, []string{"c0", "c2", "c4"}) {
		t.Errorf("%q are left", got)
	}
}

// Reads respond as kube-apiserver does, with its errors for invalid options.
func TestReads(t *testing.T) {
	fx := fixture.New(t)
	var rv string
	for i := range 5 {
		run(t, fx, write{verb: "create", body: configMap(fmt.Sprint("r", i), "}"), code: 201,
			check: func(_ *testing.T, o object) { rv = o.Metadata.ResourceVersion }})
	}
	for _, x := range []struct {
		query string
		items int
		fails string
	}{
		{"", 5, ""},
		{"limit=2", 2, ""},
		{"resourceVersion=0", 5, ""},
		{"resourceVersion=" + rv, 5, ""},
		{"resourceVersion=" + rv + "&resourceVersionMatch=Exact", 5, ""},
		{"fieldSelector=metadata.name%3Dr1", 1, ""},
		{"fieldSelector=metadata.name%21%3Dr1", 4, ""},
		{"fieldSelector=data.k%3Dv", 0, `400 BadRequest "data.k" is not a known field selector`},
		{"labelSelector=a%3Db", 0, ""},
		{"labelSelector=%3D", 0, "400 BadRequest found '=', expected"},
		{"resourceVersionMatch=Exact", 0, "422 Invalid"},
		{"resourceVersion=99999999", 0, "504 Timeout Timeout: Too large resource version: 99999999"},
		{"continue=rubbish", 0, "400 BadRequest invalid continue token: continue key is not valid"},
		{"limit=x", 0, "400 BadRequest"},
	} {
		body, err := fx.List(t.Context(), fixture.ConfigMaps, &registryv1.GetRequest{Query: x.query})
		if x.fails != "" {
			if err == nil || !strings.HasPrefix(status(err), x.fails) {
				t.Errorf("%s: %s", x.query, status(err))
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %s", x.query, status(err))
			continue
		}
		if o := decodeObject(t, body); len(o.Items) != x.items || o.Kind != "ConfigMapList" {
			t.Errorf("%s: %d items of a %s", x.query, len(o.Items), o.Kind)
		}
	}
	for name, x := range map[string]struct {
		get   *registryv1.GetRequest
		code  int32
		has   string
		fails string
	}{
		"an object": {&registryv1.GetRequest{Name: "r1"}, http.StatusOK, `"kind":"ConfigMap"`, ""},
		"yaml": {&registryv1.GetRequest{
			Name:   "r1",
			Output: &registryv1.Output{MediaType: "application/yaml"},
		}, http.StatusOK, "kind: ConfigMap\n", ""},
		"as a Table": {&registryv1.GetRequest{
			Name: "r1",
			Output: &registryv1.Output{
				MediaType: "application/json",
				As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
			},
		}, http.StatusOK, `"kind":"Table"`, ""},
		"its metadata": {&registryv1.GetRequest{
			Name: "r1",
			Output: &registryv1.Output{
				MediaType: "application/json",
				As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadata"},
			},
		}, http.StatusOK, `"kind":"PartialObjectMetadata"`, ""},
		"nothing": {&registryv1.GetRequest{Name: "none"}, 0, "", `404 NotFound configmaps "none" not found`},
		"no name": {&registryv1.GetRequest{}, 0, "", "400 BadRequest name must be provided"},
		"an export": {&registryv1.GetRequest{Name: "r1", Query: "export=true"}, 0, "",
			"400 BadRequest the export parameter, deprecated since v1.14, is no longer supported"},
	} {
		resp, err := fx.Get(t.Context(), fixture.ConfigMaps, x.get)
		switch {
		case x.fails != "":
			if err == nil || !strings.HasPrefix(status(err), x.fails) {
				t.Errorf("%s: %s", name, status(err))
			}
		case err != nil:
			t.Errorf("%s: %s", name, status(err))
		case resp.Code != x.code || !strings.Contains(string(resp.Body), x.has):
			t.Errorf("%s: %d %.200s", name, resp.Code, resp.Body)
		}
	}
}
