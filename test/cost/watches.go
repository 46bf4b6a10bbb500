package main

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"watershed.dev/platform/lifecycle"
)

// opened starts n requests, distributed over the clients, and returns when all have responded. It keeps the responses
// open and unread until the context ends.
func (a *attempt) opened(ctx context.Context, clients []*http.Client, n int, path func(i int) string) {
	answered := make(chan struct{}, n)
	for i := range n {
		go func() {
			defer func() { answered <- struct{}{} }()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+a.s.address()+path(i), nil)
			if err != nil {
				a.saw(err.Error())
				return
			}
			req.Header.Set("Authorization", "Bearer "+a.s.tokens[tenant])
			resp, err := clients[i%len(clients)].Do(req)
			if err != nil {
				a.saw(failed(err))
				return
			}
			a.saw(fmt.Sprint(resp.StatusCode))
			context.AfterFunc(ctx, func() { resp.Body.Close() })
		}()
	}
	for range n {
		select {
		case <-answered:
		case <-ctx.Done():
			return
		}
	}
}

// separate returns n clients, each with its own connections.
func (a *attempt) separate(n int) []*http.Client {
	return many(n, func(int) *http.Client { return a.newClient() })
}

// unread returns a run that opens n unread watches on some connections, and updates a ConfigMap of 900 kB meanwhile.
func unread(n, connections, updates int, query func(i int) string) func(ctx context.Context, a *attempt) {
	return func(ctx context.Context, a *attempt) {
		watching, cancel := context.WithCancel(ctx)
		defer cancel()
		a.opened(watching, a.separate(connections), n, func(i int) string { return configMaps + "?watch=1" + query(i) })
		writer := a.separate(1)[0]
		body := func(i int) []byte {
			return marshal(object{"data": object{"a": strings.Repeat(string(rune('a'+i%26)), 900_000)}})
		}
		for i := range updates {
			a.ask(ctx, request{as: tenant, method: http.MethodPatch, path: configMaps + "/large", body: body(i),
				client: writer, header: http.Header{"Content-Type": {mergeMedia}}})
		}
		_ = lifecycle.Sleep(ctx, 2*time.Second) // the servers' queues fill
	}
}

func largeOne(a *attempt) error {
	return a.prepare(configMaps, configMap("large", object{"a": "x"}))
}

const initialEvents = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"

func watches() []*shape {
	different := func(i int) string { return fmt.Sprintf("&labelSelector=x!%%3D%d", i) }
	dropped := func(name string, n, size int, path string) *shape {
		return &shape{
			name:  name,
			setup: func(a *attempt) error { return populate(a, n, size) },
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 200, 8, func(int) { a.drop(ctx, request{as: tenant, method: http.MethodGet, path: path}) })
			},
		}
	}
	return []*shape{
		dropped("200 with initial events, dropped at once", 500, 1000, configMaps+"?watch=1"+initialEvents),
		{
			name:  "1,000 on one connection",
			about: "closed after a second",
			run: func(ctx context.Context, a *attempt) {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				a.opened(ctx, a.separate(1), 1000, func(i int) string { return configMaps + "?watch=1" + different(i) })
				time.Sleep(time.Second)
			},
		},
		{
			name:  "100 unread, 20 updates of 900 kB",
			about: "each with a selector of its own, on one connection",
			setup: largeOne,
			run:   unread(100, 1, 20, different),
		},
		{
			name:  "1,000 unread, 20 updates of 900 kB",
			about: "each with a selector of its own, on four connections",
			setup: largeOne,
			run:   unread(1000, 4, 20, different),
		},
		{
			name:  "100 unread as pretty JSON, 20 updates of 900 kB",
			about: "bytes that only the registry writes",
			setup: largeOne,
			run:   unread(100, 4, 20, func(i int) string { return different(i) + "&pretty=true" }),
		},
		{
			name:  "2,000 that come and go",
			about: "on HTTP/1.1, a connection each",
			run: func(ctx context.Context, a *attempt) {
				c := newOldClient(a.s)
				times(ctx, 2000, 16, func(int) {
					a.drop(ctx, request{as: tenant, method: http.MethodGet, path: configMaps + "?watch=1", client: c})
				})
			},
		},
		{
			name:  "200 of revisions that are too old or in the future",
			about: "with a timeout of a second",
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 200, 16, func(i int) {
					a.get(ctx, tenant, fmt.Sprintf("%s?watch=1&timeoutSeconds=1&resourceVersion=%d", configMaps,
						[]int{1, 2, 1 << 50, 50}[i%4]))
				})
			},
		},
		{
			name:  "50 with selectors of 1,000 terms, 500 events",
			about: "each event is held against each selector",
			run: func(ctx context.Context, a *attempt) {
				watching, cancel := context.WithCancel(ctx)
				defer cancel()
				selector := func(w int) string {
					return url.QueryEscape(terms(1000, func(i int) string { return fmt.Sprintf("k%d!=v%d", i, w) }))
				}
				a.opened(
					watching,
					a.separate(1),
					50,
					func(i int) string { return configMaps + "?watch=1&labelSelector=" + selector(i) },
				)
				times(ctx, 500, 4, func(i int) {
					a.write(
						ctx,
						tenant,
						http.MethodPatch,
						mine,
						mergeMedia,
						marshal(object{"data": object{"a": fmt.Sprint(i)}}),
					)
				})
			},
		},
	}
}
