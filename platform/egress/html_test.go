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

// Upstream's proxy rewrites the links of short HTML responses. Responses that are long, or would be long after
// decompression or with their links rewritten, pass as they are. All do while the process rewrites too many bytes.
func TestLongHTMLIsNotRewritten(t *testing.T) {
	const link = `<a href="/x">x</a>`
	zipped := func(page string) string {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		_, _ = io.WriteString(w, page)
		_ = w.Close()
		return b.String()
	}
	long, links := link+strings.Repeat("x", maxRewritten), strings.Repeat("<a href=/>", 100_000)
	huge := link + strings.Repeat("x", maxOutput)
	for name, c := range map[string]struct {
		body      string
		gzip      bool
		others    int64 // bytes that are being rewritten for another user
		own       int64
		rewritten bool
	}{
		"short":                         {body: link, rewritten: true},
		"long":                          {body: long},
		"short, compressed":             {body: zipped(link), gzip: true, rewritten: true},
		"long, compressed":              {body: zipped(long), gzip: true, rewritten: true},
		"huge, compressed":              {body: zipped(huge), gzip: true},
		"links with a long prefix":      {body: links},
		"quotes":                        {body: link + `<x y="` + strings.Repeat("'", maxRewritten-100) + `">`},
		"short, beside many others":     {body: link, others: maxRewriting - 10_000, rewritten: true},
		"short, beside too many others": {body: link, others: maxRewriting},
		"short, beside many":            {body: link, own: maxOwnRewriting - 10_000, rewritten: true},
		"short, beside too many":        {body: link, own: maxOwnRewriting},
	} {
		t.Run(name, func(t *testing.T) {
			rewriting.add("b", c.others)
			defer rewriting.add("b", -c.others)
			rewriting.add("a", c.own)
			defer rewriting.add("a", -c.own)
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/html; charset=utf-8")
				if c.gzip {
					w.Header().Set("Content-Encoding", "gzip")
				}
				_, _ = io.WriteString(w, c.body)
			}))
			defer srv.Close()
			limited, end := LimitHTML(srv.Client().Transport, "a")
			rewriter := &proxy.Transport{PathPrepend: "/" + strings.Repeat("p", 1000), RoundTripper: limited}
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
			if end(); rewriting.all != c.others+c.own || rewriting.owners["a"] != c.own {
				t.Errorf("%d bytes count, %d of the user", rewriting.all, rewriting.owners["a"])
			}
		})
	}
}
