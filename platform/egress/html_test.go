package egress

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/proxy"
)

// Upstream's proxy rewrites the links of short HTML responses. Longer responses, also if they are short before
// decompression, pass as they are, and so do all while the process rewrites too many bytes.
func TestLongHTMLIsNotRewritten(t *testing.T) {
	const link = `<a href="/x">x</a>`
	zipped := func(page string) string {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		_, _ = io.WriteString(w, page)
		_ = w.Close()
		return b.String()
	}
	long := link + strings.Repeat("x", maxRewritten)
	for name, c := range map[string]struct {
		body      string
		gzip      bool
		rewriting int64
		rewritten bool
	}{
		"short":                         {body: link, rewritten: true},
		"long":                          {body: long},
		"short, compressed":             {body: zipped(link), gzip: true, rewritten: true},
		"long, compressed":              {body: zipped(long), gzip: true},
		"short, beside many others":     {body: link, rewriting: maxRewriting - 100, rewritten: true},
		"short, beside too many others": {body: link, rewriting: maxRewriting},
	} {
		t.Run(name, func(t *testing.T) {
			rewriting.Add(c.rewriting)
			defer rewriting.Add(-c.rewriting)
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/html; charset=utf-8")
				if c.gzip {
					w.Header().Set("Content-Encoding", "gzip")
				}
				_, _ = io.WriteString(w, c.body)
			}))
			defer srv.Close()
			limited, end := LimitHTML(srv.Client().Transport)
			rewriter := &proxy.Transport{PathPrepend: "/proxied", RoundTripper: limited}
			req, err := http.NewRequestWithContext(t.Context(), "GET", srv.URL+"/page", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Accept-Encoding", "gzip") // otherwise Go's transport decompresses the response
			resp, err := rewriter.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if (string(body) != c.body) != c.rewritten || err != nil {
				t.Errorf("%d bytes of %d, %v", len(body), len(c.body), err)
			}
			if got := resp.Header.Get("Content-Type"); !c.rewritten && got != "text/HTML; charset=utf-8" {
				t.Errorf("Content-Type %q", got)
			}
			if end(); rewriting.Load() != c.rewriting {
				t.Errorf("%d bytes still count", rewriting.Load()-c.rewriting)
			}
		})
	}
}
