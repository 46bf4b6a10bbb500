package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"watershed.dev/platform/lifecycle"
)

const (
	apiServices = "/apis/apiregistration.k8s.io/v1/apiservices"
	hostile     = "/apis/hostile.example.com/v1"
)

// register registers a backend as the API server of a group.
func register(a *attempt, h http.HandlerFunc) error {
	b, err := a.serve(h)
	if err != nil {
		return err
	}
	port, err := strconv.Atoi(b.URL[strings.LastIndexByte(b.URL, ':')+1:])
	if err != nil {
		return err
	}
	if err := a.prepare("/api/v1/namespaces/"+namespace+"/services", object{"apiVersion": "v1", "kind": "Service",
		"metadata": metadata("hostile"), "spec": object{"type": "ExternalName", "externalName": "localhost",
			"ports": []object{{"port": port}}}}); err != nil {
		return err
	}
	return a.prepare(apiServices, object{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
		"metadata": metadata("v1.hostile.example.com"), "spec": object{"group": "hostile.example.com", "version": "v1",
			"groupPriorityMinimum": 10, "versionPriority": 10, "insecureSkipTLSVerify": true,
			"service": object{"name": "hostile", "namespace": namespace, "port": port}}})
}

// aggregated returns a shape that registers an API server and sends n requests to it. The server's discovery works, and
// its other responses are hostile. Each client leaves after 4 s.
func aggregated(name, about string, n int, h http.HandlerFunc) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error {
			if err := register(a, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case strings.HasPrefix(r.URL.Path, hostile+"/"):
					h(w, r)
				case r.URL.Path == hostile:
					w.Header().Set("Content-Type", jsonMedia)
					_, _ = w.Write(resources(1))
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			}); err != nil {
				return err
			}
			return a.until(hostile, "APIResourceList")
		},
		run: func(ctx context.Context, a *attempt) {
			times(ctx, n, 8, func(i int) {
				callCtx, cancel := context.WithTimeout(ctx, longest/5)
				defer cancel()
				a.get(callCtx, tenant, fmt.Sprintf("%s/namespaces/%s/things/%d", hostile, namespace, i))
			})
		},
	}
}

// resources returns a discovery document of n resources.
func resources(n int) []byte {
	return marshal(object{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "hostile.example.com/v1",
		"resources": many(n, func(i int) object {
			return object{
				"name":       fmt.Sprintf("things%d", i),
				"namespaced": true,
				"kind":       "Thing",
				"verbs":      []string{"get"},
			}
		})})
}

// discovered returns a shape that registers an API server with hostile discovery and OpenAPI, and reads both for 8 s.
// The statuses are those of the group's own discovery, once it is served.
func discovered(name, about string, page http.HandlerFunc) *shape {
	return &shape{
		name:  name,
		about: about,
		run: func(ctx context.Context, a *attempt) {
			if err := register(a, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", jsonMedia)
				page(w, r)
			}); err != nil {
				a.saw(err.Error())
				return
			}
			ctx, cancel := context.WithTimeout(ctx, 8*time.Second)
			defer cancel()
			for ctx.Err() == nil {
				resp, _ := a.send(ctx, request{as: tenant, method: http.MethodGet, path: "/apis", header: http.Header{
					"Accept": {"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"}}})
				if resp != nil {
					a.saw(fmt.Sprint(resp.StatusCode))
				}
				a.send(ctx, request{as: tenant, method: http.MethodGet, path: "/openapi/v3"})
				a.send(ctx, request{as: tenant, method: http.MethodGet, path: "/openapi/v2"})
				_ = lifecycle.Sleep(ctx, 500*time.Millisecond)
			}
		},
	}
}

func aggregations() []*shape {
	text := strings.Repeat("x", 1<<20)
	return []*shape{
		aggregated("a server that hangs", "32 requests, 8 at once", 32, hang),
		aggregated(
			"a server that drips",
			"8 requests, a byte in 10 ms",
			8,
			func(w http.ResponseWriter, r *http.Request) {
				for r.Context().Err() == nil {
					_, _ = w.Write([]byte("x"))
					w.(http.Flusher).Flush()
					time.Sleep(10 * time.Millisecond)
				}
			},
		),
		aggregated("a server that answers 100 MB", "3 requests", 3, func(w http.ResponseWriter, _ *http.Request) {
			pour(w, text, 100)
		}),
		aggregated("a server that answers without end", "8 requests", 8, func(w http.ResponseWriter, _ *http.Request) {
			pour(w, text, 500)
		}),
		aggregated("a server with headers of 900 kB", "20 requests", 20, func(w http.ResponseWriter, _ *http.Request) {
			for i := range 900 {
				w.Header().Set(fmt.Sprintf("X-%d", i), text[:1000])
			}
			w.WriteHeader(http.StatusOK)
		}),
		aggregated("a server that cuts its answers", "20 requests", 20, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000")
			pour(w, "short", 1)
			panic(http.ErrAbortHandler)
		}),
		discovered("discovery of 20,000 resources", "2 MB", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(resources(20_000))
		}),
		discovered("discovery of 100 MB", "no resources", func(w http.ResponseWriter, _ *http.Request) {
			pour(w, `{"kind":"APIResourceList","groupVersion":"`, 1)
			pour(w, text, 100)
			pour(w, `"}`, 1)
		}),
		discovered("discovery that hangs", "", hang),
	}
}
