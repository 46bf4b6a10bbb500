package egress

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/transport"
)

func TestHeadersOfResponsesAreBounded(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Large", strings.Repeat("x", int(req.ContentLength)))
		}))
		s.EnableHTTP2 = http2
		s.StartTLS()
		t.Cleanup(s.Close)
		rt, err := transport.New(&transport.Config{TLS: transport.TLSConfig{Insecure: true}})
		if err != nil {
			t.Fatal(err)
		}
		client := &http.Client{Transport: LimitHeaders(rt)}
		for size, ok := range map[int]bool{maxHeaderBytes / 2: true, 2 * maxHeaderBytes: false} {
			resp, err := client.Post(s.URL, "", strings.NewReader(strings.Repeat("x", size)))
			if err == nil {
				resp.Body.Close()
			}
			if (err == nil) != ok {
				t.Errorf("HTTP/2 %v: headers of %d bytes: %v", http2, size, err)
			}
		}
	}
}
