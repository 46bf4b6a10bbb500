package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

const admissionregistration = "/apis/admissionregistration.k8s.io/v1/"

// onlyCheated selects the ConfigMaps that the shapes' policies and webhooks match.
var onlyCheated = object{"matchLabels": object{"cheated": "yes"}}

func cheated(i int, data object) object {
	o := configMap(fmt.Sprintf("cheated-%d", i), data)
	o["metadata"].(object)["labels"] = object{"cheated": "yes"}
	return o
}

// rulesOf returns rules that match the creation of ConfigMaps.
func rulesOf() []object {
	return []object{{"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "operations": []string{"CREATE"},
		"resources": []string{"configmaps"}}}
}

// creating returns a run that creates n ConfigMaps that policies and webhooks match.
func creating(n int, data func() object) func(ctx context.Context, a *attempt) {
	return func(ctx context.Context, a *attempt) {
		times(ctx, n, 4, func(i int) {
			a.remove(fmt.Sprintf("%s/cheated-%d", configMaps, i))
			a.create(ctx, tenant, configMaps, cheated(i, data()))
		})
	}
}

// enforced waits until the shape's policy or webhook decides on the creation of a ConfigMap.
func enforced(a *attempt, decided func(code int, text string) bool) error {
	ctx, cancel := context.WithTimeout(a.s.t.Context(), longest)
	defer cancel()
	for ctx.Err() == nil {
		resp, text := a.send(ctx, request{as: admin, method: http.MethodPost, path: configMaps + "?dryRun=All",
			body: marshal(cheated(0, object{"a": "probe"})), header: http.Header{"Content-Type": {jsonMedia}}})
		if resp != nil && decided(resp.StatusCode, string(text)) {
			return nil
		}
	}
	return ctx.Err()
}

// policy returns a shape that registers a ValidatingAdmissionPolicy and its binding, and creates 10 ConfigMaps.
func policy(name, about string, validations []object, data func() object) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error {
			probe := object{"expression": "!has(object.data) || !('a' in object.data) || object.data['a'] != 'probe'",
				"message": "policy is enforced"}
			spec := object{"matchConstraints": object{"resourceRules": rulesOf(), "objectSelector": onlyCheated},
				"validations": append([]object{probe}, validations...)}
			if err := a.prepare(admissionregistration+"validatingadmissionpolicies", object{
				"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
				"metadata": metadata("cost"), "spec": spec}); err != nil {
				return err
			}
			if err := a.prepare(admissionregistration+"validatingadmissionpolicybindings", object{
				"metadata":   metadata("cost"),
				"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
				"spec": object{"policyName": "cost", "validationActions": []string{"Deny"}}}); err != nil {
				return err
			}
			return enforced(a, func(_ int, text string) bool { return strings.Contains(text, "policy is enforced") })
		},
		run: creating(10, data),
	}
}

// webhook returns a shape that registers a webhook of a kind with a timeout of 2 s, and creates n ConfigMaps.
func webhook(name, about, kind string, n int, h http.HandlerFunc) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error {
			b, err := a.serve(h)
			if err != nil {
				return err
			}
			collection := admissionregistration + strings.ToLower(kind) + "s"
			if err := a.prepare(collection, object{"metadata": metadata("cost"),
				"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "webhooks": []object{{
					"name": "cost.example.com", "rules": rulesOf(), "objectSelector": onlyCheated,
					"sideEffects":             "None",
					"admissionReviewVersions": []string{"v1"}, "timeoutSeconds": 2, "failurePolicy": "Fail",
					"clientConfig": object{"url": b.URL + "/admit", "caBundle": b.bundle},
				}}}); err != nil {
				return err
			}
			return enforced(a, func(code int, text string) bool {
				return code != http.StatusCreated || strings.Contains(text, "webhook was here")
			})
		},
		run: creating(n, func() object { return object{"a": "x"} }),
	}
}

// admitted returns a handler that responds to an admission review with a patch.
func admitted(patch func() []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Request struct {
				UID    string
				DryRun *bool
			}
		}
		body, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(body, &in)
		answer := object{"uid": in.Request.UID, "allowed": true, "patchType": "JSONPatch"}
		if in.Request.DryRun != nil && *in.Request.DryRun {
			answer["patch"] = []byte(`[{"op":"add","path":"/data/b","value":"webhook was here"}]`)
		} else {
			answer["patch"] = patch()
		}
		w.Header().Set("Content-Type", jsonMedia)
		_, _ = w.Write(
			marshal(object{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}),
		)
	}
}

func admissions() []*shape {
	const mutating, validating = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
	list := func() object { return object{"list": strings.TrimSuffix(strings.Repeat("x,", 1000), ",")} }
	validations := func(n int, expression string) []object {
		return many(n, func(i int) object { return object{"expression": fmt.Sprintf(expression, i)} })
	}
	return []*shape{
		policy("a policy within its budget", "10 objects, 50 expressions over 1,000 items", validations(50,
			"!('list' in object.data) || object.data['list'].split(',').all(x, x != 'no%d')"), list),
		policy("a policy beyond its budget", "10 objects, each item against each", validations(
			1,
			"!('list' in object.data) || object.data['list'].split(',').all(x, object.data['list'].split(',').all(y, "+
				"x == y || x != 'no%d'))",
		),
			list),
		policy("a policy of long strings", "10 objects, replace and matches of 500 kB", validations(
			5,
			"!('list' in object.data) || object.data['list'].replace('x', 'xxxxxxxxxx').matches('^(x*,?)*$') "+
				"|| %d == 7",
		),
			func() object { return object{"list": strings.Repeat("x,", 250_000)} }),
		policy("a policy that asks the authorizer", "10 objects, 20 checks each", validations(20,
			"authorizer.group('').resource('pods').namespace('n%d').check('get').allowed() || true"), list),
		webhook("a mutating webhook whose patch copies 22 times", "", mutating, 1, admitted(func() []byte {
			return operations(22, copies)
		})),
		webhook("a mutating webhook of 10,000 operations", "5 objects", mutating, 5, admitted(func() []byte {
			return operations(10_000, func(i int) object {
				return object{"op": "add", "path": fmt.Sprintf("/data/k%d", i), "value": "x"}
			})
		})),
		webhook("a validating webhook that hangs", "10 objects", validating, 10, hang),
		webhook("a validating webhook that answers 100 MB", "3 objects", validating, 3,
			func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", jsonMedia)
				pour(w, strings.Repeat(" ", 1<<20), 100)
			}),
		webhook("a validating webhook with 1 MB of warnings", "5 objects", validating, 5,
			func(w http.ResponseWriter, r *http.Request) {
				var in struct{ Request struct{ UID string } }
				_ = json.NewDecoder(r.Body).Decode(&in)
				w.Header().Set("Content-Type", jsonMedia)
				_, _ = w.Write(
					marshal(object{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": object{
						"uid": in.Request.UID, "allowed": false,
						"status": object{"message": "webhook was here" + strings.Repeat("m", 1_000_000)},
						"warnings": many(
							4000,
							func(i int) string { return fmt.Sprint(i, strings.Repeat("w", 250)) },
						)}}),
				)
			}),
	}
}
