package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// http1Requests returns a shape that sends n requests over HTTP/1.1.
func http1Requests(name, about string, as sender, n int, path func(i int) string) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		c := newOldClient(a.s)
		times(ctx, n, 8, func(i int) { a.ask(ctx, request{as: as, method: http.MethodGet, path: path(i), client: c}) })
	}}
}

func limits() []*shape {
	query := func(n int) string {
		return strings.Join(many(n, func(i int) string { return fmt.Sprintf("p%d=v", i) }), "&")
	}
	return []*shape{
		http1Requests("100 strangers' paths of 900 kB", "read to the end", anonymous, 100, func(i int) string {
			return fmt.Sprintf("/%d%s", i, strings.Repeat("a", 900_000))
		}),
		http1Requests("100 paths of 450,000 slashes", "", anonymous, 100, func(i int) string {
			return fmt.Sprintf("/apis/%d%s", i, strings.Repeat("/a", 450_000))
		}),
		http1Requests("100 names of 250 kB", "", tenant, 100, func(i int) string {
			return fmt.Sprintf("%s/%d%s", configMaps, i, strings.Repeat("a", 250_000))
		}),
		http1Requests("100 namespaces of 250 kB", "", tenant, 100, func(i int) string {
			return fmt.Sprintf("/api/v1/namespaces/%d%s/pods", i, strings.Repeat("a", 250_000))
		}),
		http1Requests("50 queries of 10,000 parameters", "", tenant, 50, func(i int) string {
			return fmt.Sprintf("%s?limit=1&x=%d&%s", configMaps, i, query(10_000))
		}),
		http1Requests("50 queries of 80,000 parameters", "one name", tenant, 50, func(i int) string {
			return fmt.Sprintf("%s?limit=1&x=%d%s", configMaps, i, strings.Repeat("&dryRun=All", 80_000))
		}),
		http1Requests("1,000 paths that there are not", "a path each", anonymous, 1000, func(i int) string {
			return fmt.Sprintf("/apis/g%d.example.com/v1/namespaces/n/r%d", i, i)
		}),
		{
			name:  "1,000 methods and verbs that there are not",
			about: "a method each",
			run: func(ctx context.Context, a *attempt) {
				c := newOldClient(a.s)
				times(ctx, 1000, 8, func(i int) {
					a.ask(ctx, request{as: tenant, method: fmt.Sprintf("M%d", i), path: configMaps, client: c})
				})
			},
		},
		{
			name:  "20 requests of 50,000 headers",
			about: "50,000 headers",
			run: func(ctx context.Context, a *attempt) {
				c := newOldClient(a.s)
				times(ctx, 20, 4, func(i int) {
					h := http.Header{}
					for j := range 50_000 {
						h[fmt.Sprintf("X%d", j)] = []string{"v"}
					}
					a.ask(
						ctx,
						request{
							as:     tenant,
							method: http.MethodGet,
							path:   configMaps + "?limit=1",
							client: c,
							header: h,
						},
					)
				})
			},
		},
		{
			name:  "100 user agents of 900 kB",
			about: "of strangers",
			run: func(ctx context.Context, a *attempt) {
				c := newOldClient(a.s)
				times(ctx, 100, 4, func(i int) {
					a.ask(ctx, request{method: http.MethodGet, path: "/api", client: c, header: http.Header{
						"User-Agent": {fmt.Sprintf("%d%s", i, strings.Repeat("a", 900_000))}}})
				})
			},
		},
	}
}
