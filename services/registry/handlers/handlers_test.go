package handlers_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
				fails: `400 BadRequest ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding ` +
					`error: unknown field "dta"`,
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

// The error for an object above the limit of etcd's client has the text of kube-apiserver's.
func TestAnObjectAboveTheLimitOfEtcdsClient(t *testing.T) {
	fx := fixture.New(t)
	finalizers := make([]string, 40000)
	for i := range finalizers {
		finalizers[i] = fmt.Sprintf("\"example.com/a-finalizer-with-a-name-of-sixty-characters-%05d\"", i)
	}
	_, err := fx.Write(t.Context(), &commonv1.Resource{Version: "v1", Resource: "configmaps"}, &registryv1.WriteRequest{
		Verb: "create",
		Body: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","finalizers":[` +
			strings.Join(finalizers, ",") + `]}}`),
	}, &fixture.Callbacks{})
	const want = "rpc error: code = ResourceExhausted desc = trying to send message larger than max"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %.300v, want %s", err, want)
	}
}
