package egress

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// An answer is bounded after it is expanded, in proportion to its request.
func TestAnswersAreBounded(t *testing.T) {
	const base, factor, request = 1 << 20, 4, 1 << 18
	for name, x := range map[string]struct {
		bytes int
		gzip  bool
		fails bool
	}{
		"as large as may be":      {bytes: base + factor*request},
		"one byte larger":         {bytes: base + factor*request + 1, fails: true},
		"gzip":                    {bytes: base + factor*request, gzip: true},
		"gzip, one byte larger":   {bytes: base + factor*request + 1, gzip: true, fails: true},
		"gzip, a thousand larger": {bytes: 64 << 20, gzip: true, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				to := io.Writer(w)
				if x.gzip {
					w.Header().Set("Content-Encoding", "gzip")
					z := gzip.NewWriter(w)
					defer z.Close()
					to = z
				}
				_, _ = io.CopyN(to, zeros{}, int64(x.bytes))
			}))
			t.Cleanup(s.Close)
			c := &http.Client{Transport: BoundAnswers(s.Client().Transport, base, factor)}
			resp, err := c.Post(s.URL+"/hook", "", strings.NewReader(strings.Repeat("x", request)))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			n, err := io.Copy(io.Discard, resp.Body)
			switch {
			case !x.fails && (err != nil || n != int64(x.bytes)):
				t.Errorf("%d bytes are read, %v", n, err)
			case x.fails && (err == nil || n > base+factor*request):
				t.Errorf("%d bytes are read, %v", n, err)
			case x.fails && (!strings.Contains(err.Error(), "/hook") || !strings.Contains(err.Error(), "2097152 bytes")):
				t.Errorf("the error does not name the webhook and the bound: %v", err)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
