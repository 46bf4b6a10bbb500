package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// upgrade returns a shape that sends n upgrade requests, and keeps the connections open for 5 s.
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
				if ctx.Err() != nil {
					return noAnswer
				}
				<-ctx.Done()
				return status
			},
		).run,
	}
}

// served starts a kubelet, and creates its Node and a pod bound to the Node. Watershed verifies kubelets with the
// cluster's CA; kube-apiserver has no kubelet CA here.
func served(a *attempt, kubelet http.HandlerFunc) error {
	var b *backend
	var err error
	if a.s.form == kubeAPIServer {
		b, err = a.serve(kubelet)
	} else {
		var cert tls.Certificate
		if cert, err = tls.LoadX509KeyPair(a.s.server.ServingCertificate("kubelet", "127.0.0.1")); err == nil {
			b = a.serveAs(cert, kubelet)
		}
	}
	if err != nil {
		return err
	}
	at, err := url.Parse(b.URL)
	if err != nil {
		return err
	}
	port, err := strconv.Atoi(at.Port())
	if err != nil {
		return err
	}
	if err := a.prepare("/api/v1/nodes", object{"apiVersion": "v1", "kind": "Node", "metadata": metadata("hostile"),
		"status": object{
			"addresses":       []object{{"type": "InternalIP", "address": "127.0.0.1"}},
			"daemonEndpoints": object{"kubeletEndpoint": object{"Port": port}},
		}}); err != nil {
		return err
	}
	return a.prepare(pods, object{"apiVersion": "v1", "kind": "Pod", "metadata": metadata("served"),
		"spec": object{
			"automountServiceAccountToken": false,
			"nodeName":                     "hostile",
			"containers":                   []object{{"name": "c", "image": "i"}},
		}})
}

// accept is a kubelet that accepts each upgrade to SPDY, and sends no data.
func accept(w http.ResponseWriter, r *http.Request) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	defer context.AfterFunc(r.Context(), func() { conn.Close() })()
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"+
		"X-Stream-Protocol-Version: %s\r\n\r\n", r.Header.Get("X-Stream-Protocol-Version"))
	_, _ = io.Copy(io.Discard, conn)
}

// at makes kubelet serve the shape's pod.
func (s *shape) at(kubelet http.HandlerFunc) *shape {
	s.setup = func(a *attempt) error { return served(a, kubelet) }
	return s
}

func upgrades() []*shape {
	const socket = "Origin: https://x\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	const lonely, bound = pods + "/lonely/", pods + "/served/"
	const exec = "exec?command=sh&stdin=true&stdout=true"
	return []*shape{
		upgrade("200 execs of a pod without a node", "SPDY", 200, lonely+exec,
			"SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io\r\n"),
		upgrade(
			"200 execs of a pod without a node, by WebSocket",
			"",
			200,
			lonely+exec,
			"websocket",
			socket+"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n",
		),
		upgrade("200 port forwards to a pod without a node", "", 200, lonely+"portforward", "SPDY/3.1",
			"X-Stream-Protocol-Version: portforward.k8s.io\r\n"),
		upgrade("200 execs left open", "for 5 s", 200, bound+exec, "SPDY/3.1",
			"X-Stream-Protocol-Version: v4.channel.k8s.io\r\n").at(accept),
		upgrade("200 execs at a kubelet that hangs", "for 5 s", 200, bound+exec, "SPDY/3.1",
			"X-Stream-Protocol-Version: v4.channel.k8s.io\r\n").at(hang),
		upgrade("200 port forwards left open, by WebSocket", "for 5 s", 200, bound+"portforward", "websocket",
			socket+"Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n").at(accept),
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
