package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// populate creates n labelled ConfigMaps of size bytes.
func populate(a *attempt, n, size int) error {
	ctx, cancel := context.WithTimeout(a.s.t.Context(), 2*longest)
	defer cancel()
	text := strings.Repeat("x", size)
	a.remove(configMaps + "?labelSelector=many")
	times(ctx, n, 8, func(i int) {
		o := configMap(fmt.Sprintf("many-%d", i), object{"a": text})
		o["metadata"].(object)["labels"] = object{"many": fmt.Sprint(i)}
		a.send(ctx, request{as: admin, method: http.MethodPost, path: configMaps, body: marshal(o),
			header: http.Header{"Content-Type": {jsonMedia}}})
	})
	return a.until(configMaps+"?limit=1&labelSelector=many="+fmt.Sprint(n-1), "many-")
}

// continueToken returns a continue token of the storage: the revision, and the key after which the list continues.
func continueToken(rv int64, start string) string {
	return base64.RawURLEncoding.EncodeToString(marshal(object{"v": "meta.k8s.io/v1", "rv": rv, "start": start}))
}

// terms joins n terms of a selector.
func terms(n int, f func(i int) string) string {
	return strings.Join(many(n, f), ",")
}

func lists() []*shape {
	listing := func(name, about string, n int, path func() string, headers ...string) *shape {
		return &shape{name: name, about: about,
			setup: func(a *attempt) error { return populate(a, 500, 10) },
			run: func(ctx context.Context, a *attempt) {
				h := http.Header{}
				for i := 0; i+1 < len(headers); i += 2 {
					h.Set(headers[i], headers[i+1])
				}
				times(ctx, n, 4, func(int) {
					a.ask(ctx, request{as: tenant, method: http.MethodGet, path: path(), header: h})
				})
			}}
	}
	selector := func(text string) string { return configMaps + "?labelSelector=" + url.QueryEscape(text) }
	return []*shape{
		listing("10,000 label terms", "k0!=v,k1!=v,…, 10 lists", 10, func() string {
			return selector(terms(10_000, func(i int) string { return fmt.Sprintf("k%d!=v", i) }))
		}),
		listing("a label selector of 500 kB that is no selector", "10 lists", 10, func() string {
			return selector(strings.Repeat("(", 150_000))
		}),
		listing("1,000 field terms", "10 lists", 10, func() string {
			return configMaps + "?fieldSelector=" + url.QueryEscape(terms(1000, func(i int) string {
				return fmt.Sprintf("metadata.name!=n%d", i)
			}))
		}),
		{
			name: "forged continue tokens",
			about: "keys that go upwards, old and future revisions, no token, a token of 500 kB, not JSON, negative " +
				"revisions; 4 times each",
			run: func(ctx context.Context, a *attempt) {
				all := []string{
					continueToken(1, "default/x\x00"), continueToken(1<<60, "x\x00"), continueToken(-5, "x\x00"),
					continueToken(0, "../../secrets/\x00"), continueToken(-1, "../../../\x00"), "forged",
					base64.RawURLEncoding.EncodeToString([]byte("{")), continueToken(-1, strings.Repeat("x", 500_000)),
					base64.RawURLEncoding.EncodeToString([]byte(nested(100_000, "[", "", "]"))),
				}
				times(ctx, 4*len(all), 4, func(i int) {
					a.get(ctx, tenant, configMaps+"?limit=5&continue="+url.QueryEscape(all[i%len(all)]))
				})
			},
		},
		{
			name:  "old continue tokens",
			about: "50 lists from the first revision after 300 writes",
			setup: func(a *attempt) error { return populate(a, 300, 10) },
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 50, 4, func(i int) {
					a.get(ctx, tenant, configMaps+"?limit=5&continue="+continueToken(int64(100+i), "many-1\x00"))
				})
			},
		},
		{
			name:  "pages of one",
			about: "2,000 ConfigMaps, one a page",
			setup: func(a *attempt) error { return populate(a, 2000, 10) },
			run: func(ctx context.Context, a *attempt) {
				next := ""
				for ctx.Err() == nil {
					_, text := a.get(
						ctx,
						tenant,
						configMaps+"?limit=1&labelSelector=many&continue="+url.QueryEscape(next),
					)
					var list struct{ Metadata struct{ Continue string } }
					if json.Unmarshal(text, &list) != nil || list.Metadata.Continue == "" {
						return
					}
					next = list.Metadata.Continue
				}
			},
		},
		{
			name:  "100 lists of 20 MB at once",
			about: "100 ConfigMaps of 200 kB",
			setup: func(a *attempt) error { return populate(a, 100, 200_000) },
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 100, 25, func(int) { a.get(ctx, tenant, configMaps) })
			},
		},
		{
			name:  "20 lists of 20 MB as pretty JSON, YAML, gzip and Tables",
			about: "100 ConfigMaps of 200 kB",
			setup: func(a *attempt) error { return populate(a, 100, 200_000) },
			run: func(ctx context.Context, a *attempt) {
				headers := []http.Header{
					{"Accept": {jsonMedia}},
					{"Accept": {yamlMedia}},
					{"Accept-Encoding": {"gzip"}},
					{"Accept": {tableMedia}},
				}
				times(ctx, 20, 4, func(i int) {
					path := configMaps
					if i%4 == 0 {
						path += "?pretty=true"
					}
					a.ask(ctx, request{as: tenant, method: http.MethodGet, path: path, header: headers[i%4]})
				})
			},
		},
		{
			name:  "20 lists of 20 MB that nobody reads",
			about: "the clients leave after the headers",
			setup: func(a *attempt) error { return populate(a, 100, 200_000) },
			run: func(ctx context.Context, a *attempt) {
				times(
					ctx,
					20,
					4,
					func(int) { a.drop(ctx, request{as: tenant, method: http.MethodGet, path: configMaps}) },
				)
			},
		},
		listing(
			"Accept of 1,000 clauses",
			"20 lists",
			20,
			func() string { return configMaps + "?limit=1" },
			"Accept",
			terms(
				1000,
				func(i int) string { return fmt.Sprintf("application/x%d;q=0.5;as=Table;g=meta.k8s.io", i) },
			)+",*/*",
		),
		listing("Accept-Encoding of 900 kB", "20 lists", 20, func() string { return configMaps + "?limit=1" },
			"Accept-Encoding", strings.Repeat("br;q=0.1, ", 90_000)),
	}
}

const tableMedia = "application/json;as=Table;v=v1;g=meta.k8s.io"

// drop sends a request, and leaves after the response's headers.
func (a *attempt) drop(ctx context.Context, r request) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, r.method, "https://"+a.s.address()+r.path, nil)
	if err != nil {
		a.saw(err.Error())
		return
	}
	if r.as != anonymous {
		req.Header.Set("Authorization", "Bearer "+a.s.tokens[r.as])
	}
	c := r.client
	if c == nil {
		c = a.client
	}
	resp, err := c.Do(req)
	if err != nil {
		a.saw(failed(err))
		return
	}
	a.saw(fmt.Sprint(resp.StatusCode))
	resp.Body.Close()
}
