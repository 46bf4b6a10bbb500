package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// dial opens a TLS connection with an ALPN protocol. The connection closes with the context.
func (a *attempt) dial(ctx context.Context, protocol string) (net.Conn, error) {
	d := &tls.Dialer{Config: a.s.tls(protocol)}
	c, err := d.DialContext(ctx, "tcp", a.s.address())
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { c.Close() })
	if end, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(end)
	}
	return c, nil
}

// raw returns a shape that runs f on n connections in parallel, for a limited time.
func raw(name, about string, n int, within time.Duration, protocol string,
	f func(ctx context.Context, a *attempt, i int, c net.Conn) string,
) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		times(ctx, n, min(n, 200), func(i int) {
			c, err := a.dial(ctx, protocol)
			if err != nil {
				a.saw(failed(err))
				return
			}
			defer c.Close()
			a.saw(f(ctx, a, i, c))
		})
	}}
}

// answered returns the status of a response.
func answered(c net.Conn) string {
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return failed(err)
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<16))
	return fmt.Sprint(resp.StatusCode)
}

// slowly sends a text byte by byte, and returns true if it sent the whole text.
func slowly(ctx context.Context, c net.Conn, text string, pause time.Duration) bool {
	for i := range len(text) {
		if _, err := io.WriteString(c, text[i:i+1]); err != nil {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
	return true
}

func connections() []*shape {
	const old = "http/1.1"
	const host = "Host: x\r\n"
	authorized := func(a *attempt) string { return host + "Authorization: Bearer " + a.s.tokens[tenant] + "\r\n" }
	// sendText returns a shape that sends a text on each connection and reads the response.
	sendText := func(name, about string, n int, text func(a *attempt, i int) string) *shape {
		return raw(name, about, n, longest, old, func(_ context.Context, a *attempt, i int, c net.Conn) string {
			go func() { _, _ = io.WriteString(c, text(a, i)) }()
			return answered(c)
		})
	}
	return []*shape{
		raw("300 strangers' paths of 900 kB, dropped", "closed after 64 bytes of the answer", 300, longest, old,
			func(_ context.Context, _ *attempt, i int, c net.Conn) string {
				go func() {
					_, _ = fmt.Fprintf(c, "GET /%d%s HTTP/1.1\r\n%s\r\n", i, strings.Repeat("a", 900_000), host)
				}()
				b := make([]byte, 64)
				if n, err := io.ReadFull(c, b); err != nil {
					return failed(err)
				} else if f := strings.Fields(string(b[:n])); len(f) > 1 {
					return f[1]
				}
				return closed
			}),
		raw("500 connections without a byte", "open for 8 s", 500, 8*time.Second, old,
			func(ctx context.Context, _ *attempt, _ int, _ net.Conn) string { <-ctx.Done(); return noAnswer }),
		raw("200 slow headers", "a byte in 100 ms, for 8 s", 200, 8*time.Second, old,
			func(ctx context.Context, _ *attempt, _ int, c net.Conn) string {
				if slowly(ctx, c, "GET /api HTTP/1.1\r\nX: "+strings.Repeat("a", 1000), 100*time.Millisecond) {
					return "sent"
				}
				return noAnswer
			}),
		raw("200 slow bodies", "of 3 MB, a byte in 100 ms, for 8 s", 200, 8*time.Second, old,
			func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
				_, _ = fmt.Fprintf(
					c,
					"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: 3000000\r\n\r\n",
					configMaps,
					authorized(a),
				)
				slowly(ctx, c, strings.Repeat(" ", 1000), 100*time.Millisecond)
				return noAnswer
			}),
		raw("20 bodies of 3 MB that stop before their end", "for 5 s", 20, 5*time.Second, old,
			func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
				_, _ = fmt.Fprintf(
					c,
					"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: 3000000\r\n\r\n%s",
					configMaps,
					authorized(a),
					strings.Repeat(" ", 2_900_000),
				)
				<-ctx.Done()
				return noAnswer
			}),
		raw("20 strangers' bodies of 100 MB in chunks", "for 5 s", 20, 5*time.Second, old,
			func(_ context.Context, _ *attempt, _ int, c net.Conn) string {
				_, _ = fmt.Fprintf(c, "POST %s HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n", configMaps, host)
				go pour(c, "100000\r\n"+strings.Repeat("a", 1<<20)+"\r\n", 100)
				return answered(c)
			}),
		sendText("50 request lines of 5 MB", "", 50, func(_ *attempt, i int) string {
			return fmt.Sprintf("GET /%d%s HTTP/1.1\r\n%s\r\n", i, strings.Repeat("a", 5_000_000), host)
		}),
		sendText("100 trailers of 900 kB", "", 100, func(a *attempt, _ int) string {
			return "POST " + configMaps + " HTTP/1.1\r\n" + authorized(a) +
				"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n1\r\n{\r\n0\r\nX: " +
				strings.Repeat("a", 900_000) + "\r\n\r\n"
		}),
		raw("20 connections with 500 requests in a row", "pipelined, and never read", 20, 6*time.Second, old,
			func(ctx context.Context, a *attempt, _ int, c net.Conn) string {
				go pour(c, "GET /api HTTP/1.1\r\n"+authorized(a)+"\r\n", 500)
				<-ctx.Done()
				return noAnswer
			}),
		raw("2,000 connections, closed after the handshake", "", 2000, longest, old,
			func(context.Context, *attempt, int, net.Conn) string { return closed }),
	}
}
