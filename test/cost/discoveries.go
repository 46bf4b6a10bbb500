package main

import (
	"context"
	"net/http"
)

// storm returns a shape that sends n requests for a path with an Accept header, without compression.
func storm(name, about string, n int, path, accept string) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		h := http.Header{"Accept": {accept}}
		times(ctx, n, 16, func(int) {
			a.ask(ctx, request{as: tenant, method: http.MethodGet, path: path, header: h})
		})
	}}
}

func discoveries() []*shape {
	const whole = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	return []*shape{
		storm("500 of OpenAPI v3's index", "", 500, "/openapi/v3", jsonMedia),
		storm("200 of OpenAPI v3's apps/v1", "1 MB each, uncompressed", 200, "/openapi/v3/apis/apps/v1", jsonMedia),
		storm("50 of OpenAPI v2", "4 MB each, uncompressed", 50, "/openapi/v2", jsonMedia),
		storm("500 of the aggregated discovery", "uncompressed", 500, "/apis", whole),
		{
			name: "20 of /metrics by an administrator",
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 20, 4, func(int) { a.get(ctx, admin, "/metrics") })
			},
		},
		{
			name:  "1,000 of /version by strangers",
			about: "a connection each",
			run: func(ctx context.Context, a *attempt) {
				c := newOldClient(a.s)
				times(
					ctx,
					1000,
					16,
					func(int) { a.ask(ctx, request{method: http.MethodGet, path: "/version", client: c}) },
				)
			},
		},
	}
}
