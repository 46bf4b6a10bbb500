package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// runLoudTenant is the tenant's process, for a server's URL, a namespace and a token.
func runLoudTenant(ctx context.Context, args []string) (counters func() map[string]int64) {
	t := &loudTenant{url: args[0], path: args[0] + "/api/v1/namespaces/" + args[1] + "/configmaps", token: args[2]}
	t.begin(ctx, args[1])
	return func() map[string]int64 {
		t.done.Wait()
		return map[string]int64{
			"lists answered":        t.lists.Load(),
			"lists refused":         t.refused.Load(),
			"events of its watches": t.events.Load(),
			"changes made":          t.changes.Load(),
			"watches begun":         t.watches.Load(),
		}
	}
}

// loudTenant is the tenant's load.
type loudTenant struct {
	url, path, token                         string
	lists, refused, events, changes, watches atomic.Int64

	done sync.WaitGroup
}

func (l *loudTenant) begin(ctx context.Context, name string) {
	path, token := l.path, l.token
	send := func(do func(*http.Request) (*http.Response, error), method, path, body, contentType string) (int, error) {
		req, err := http.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
		check(err)
		req.Header.Set("Content-Type", contentType)
		resp, err := do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, err
	}
	for range 20 { // each connection has 250 watches
		do := bearer(token)
		for range tenantWatches / 20 {
			l.done.Go(func() { l.watch(ctx, do) })
		}
	}
	lister := bearer(token)
	for range tenantListers {
		l.done.Go(func() {
			tick := time.NewTicker(time.Second * tenantListers / tenantLists)
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				switch code, err := send(lister, "GET", path, "", ""); {
				case err == nil && code == http.StatusOK:
					l.lists.Add(1)
				case err == nil && code == http.StatusTooManyRequests:
					l.refused.Add(1)
				}
			}
		})
	}
	l.done.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			change := fmt.Sprintf(`{"data":{"n":"%d"}}`, i)
			if code, _ := send(lister, "PATCH", path+"/c0", change,
				"application/merge-patch+json"); code == http.StatusOK {
				l.changes.Add(1)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	at, err := url.Parse(l.url)
	check(err)
	for range tenantBodies {
		l.done.Go(func() {
			conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", at.Host,
				&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = fmt.Fprintf(
				conn,
				"POST /api/v1/namespaces/%s/configmaps HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"+
					"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n",
				name,
				token,
			)
			for ctx.Err() == nil {
				if _, err := conn.Write([]byte(" ")); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
}

// watch keeps a watch of the object open, and counts its events.
func (l *loudTenant) watch(ctx context.Context, do func(*http.Request) (*http.Response, error)) {
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, "GET", l.path+"?watch=1&fieldSelector=metadata.name%3Dc0", nil)
		check(err)
		resp, err := do(req)
		if err != nil {
			time.Sleep(time.Second)
			continue
		}
		if resp.StatusCode == http.StatusOK {
			l.watches.Add(1)
			for lines := bufio.NewReader(resp.Body); err == nil; {
				if _, err = lines.ReadSlice('\n'); err == nil {
					l.events.Add(1)
				} else if errors.Is(err, bufio.ErrBufferFull) {
					err = nil
				}
			}
		}
		resp.Body.Close()
		time.Sleep(time.Second) // like a client's backoff
	}
}
