package main

import (
	"context"
	"net"
	"net/http"
	"time"
)

// upgrade sends n requests to upgrade a connection, and keeps the connections open for 5 s.
func upgrade(name, about string, n int, path, protocol string, more string) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error {
			return a.prepare(pods, object{"apiVersion": "v1", "kind": "Pod", "metadata": metadata("lonely"),
				"spec": object{
					"automountServiceAccountToken": false,
					"containers":                   []object{{"name": "c", "image": "i"}},
				}})
		},
		run: raw(
			name,
			about,
			n,
			5*time.Second,
			"http/1.1",
			func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
				text := "POST " + path + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + a.s.tokens[tenant] +
					"\r\nConnection: Upgrade\r\nUpgrade: " + protocol + "\r\n" + more + "\r\n"
				if protocol == "websocket" {
					text = "GET" + text[len("POST"):]
				}
				pour(c, text, 1)
				status := answered(c)
				<-ctx.Done()
				return status
			},
		).run,
	}
}

func upgrades() []*shape {
	const socket = "Origin: https://x\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	const lonely = pods + "/lonely/"
	return []*shape{
		upgrade("200 execs of a pod without a node", "SPDY", 200, lonely+"exec?command=sh&stdin=true&stdout=true",
			"SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io\r\n"),
		upgrade(
			"200 execs of a pod without a node, by WebSocket",
			"",
			200,
			lonely+"exec?command=sh&stdin=true&stdout=true",
			"websocket",
			socket+"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n",
		),
		upgrade("200 port forwards to a pod without a node", "", 200, lonely+"portforward", "SPDY/3.1",
			"X-Stream-Protocol-Version: portforward.k8s.io\r\n"),
		upgrade("100 watches by WebSocket", "open for 5 s, unread", 100, configMaps+"?watch=1", "websocket", socket),
		{
			name:  "200 logs followed of a pod without a node",
			setup: upgrade("", "", 0, "", "", "").setup,
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 200, 16, func(int) {
					a.ask(ctx, request{as: tenant, method: http.MethodGet, path: lonely + "log?follow=true"})
				})
			},
		},
	}
}
