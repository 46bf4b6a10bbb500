package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// review is the ConversionReview that a webhook receives.
type review struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Request    struct {
		UID               string
		DesiredAPIVersion string
		Objects           []object
	} `json:"request"`
}

// converted responds to a conversion with the objects in the desired version. change may modify each object.
func converted(w http.ResponseWriter, r *http.Request, change func(o object) object) {
	var in review
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	all := []object{}
	for _, o := range in.Request.Objects {
		o["apiVersion"] = in.Request.DesiredAPIVersion
		all = append(all, change(o))
	}
	w.Header().Set("Content-Type", jsonMedia)
	_, _ = w.Write(marshal(object{"apiVersion": in.APIVersion, "kind": in.Kind, "response": object{
		"uid": in.Request.UID, "convertedObjects": all, "result": object{"status": "Success"}}}))
}

// converting returns a shape that defines widgets with a conversion webhook. It reads n widgets n times in the version
// that needs the conversion.
func converting(name, about string, n int, h http.HandlerFunc) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error {
			b, err := a.serve(h)
			if err != nil {
				return err
			}
			conversion := object{"strategy": "Webhook", "webhook": object{"conversionReviewVersions": []string{"v1"},
				"clientConfig": object{"url": b.URL + "/convert", "caBundle": b.bundle}}}
			if err := define(a, definition(conversion, version("v1", true, anything(), nil),
				version("v2", false, anything(), nil))); err != nil {
				return err
			}
			for i := range n {
				if err := a.prepare(widgets, widget("v1", fmt.Sprintf("w%d", i), object{"a": "x"})); err != nil {
					return err
				}
			}
			return nil
		},
		run: func(ctx context.Context, a *attempt) {
			later := strings.Replace(widgets, "/v1/", "/v2/", 1)
			get := func(path string) {
				callCtx, cancel := context.WithTimeout(ctx, longest/5)
				defer cancel()
				a.get(callCtx, tenant, path)
			}
			times(ctx, n, 4, func(i int) {
				get(fmt.Sprintf("%s/w%d", later, i))
				get(later)
			})
		},
	}
}

func conversions() []*shape {
	grown := strings.Repeat("x", 1<<20)
	return []*shape{
		converting("a webhook that hangs", "the clients leave after 4 s", 4, hang),
		converting("a webhook that answers 100 MB", "", 1, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", jsonMedia)
			pour(w, strings.Repeat(" ", 1<<20), 100)
		}),
		converting(
			"a webhook that grows objects to 1 MB",
			"10 objects",
			10,
			func(w http.ResponseWriter, r *http.Request) {
				converted(w, r, func(o object) object {
					o["spec"] = object{"a": grown}
					return o
				})
			},
		),
		converting(
			"a webhook that lies",
			"it changes names, uids and kinds",
			5,
			func(w http.ResponseWriter, r *http.Request) {
				converted(w, r, func(o object) object {
					o["metadata"] = object{"name": "other", "uid": "other", "namespace": "kube-system"}
					return o
				})
			},
		),
		converting("a webhook that answers 100,000 levels", "", 5, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", jsonMedia)
			pour(w, nested(100_000, `{"a":`, "1", "}"), 1)
		}),
	}
}
