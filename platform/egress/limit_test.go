package egress

import (
	"compress/gzip"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
)

// The bound of a response applies after decompression, in proportion to the request.
func TestResponsesAreBounded(t *testing.T) {
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
			c := &http.Client{Transport: LimitResponses(s.Client().Transport, base, factor)}
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
			case x.fails &&
				(!strings.Contains(err.Error(), "/hook") || !strings.Contains(err.Error(), "2097152 bytes")):
				t.Errorf("the error does not name the webhook and the bound: %v", err)
			}
		})
	}
}

// Values counts outside of strings, for every division of the JSON into pieces.
func TestValuesAreCounted(t *testing.T) {
	for text, want := range map[string]int{
		`{"a":[1,2],"b":{}}`: 5,
		`"[{,"`:              0,
		`["\",[",1]`:         2,
		`["\\",1]`:           2,
	} {
		var v Values
		for i := range text {
			_, _ = v.Write([]byte(text[i : i+1]))
		}
		if v.Count() != want || ValuesOf([]byte(text)) != want {
			t.Errorf("%s has %d values, or %d", text, v.Count(), ValuesOf([]byte(text)))
		}
	}
}

// A patch of an admission webhook is a base64 string. The values that it decodes to count.
func TestValuesInBase64AreCounted(t *testing.T) {
	patch := base64.StdEncoding.EncodeToString([]byte(`[{},{},{"a":"[,"}]`)) // 6 values
	for text, want := range map[string]int{
		`{"patch":"` + patch + `"}`:                                    7,
		`{"patch":"` + patch[:8] + `\n` + patch[8:] + `","b":1}`:       8,
		`["` + patch + `","` + patch + `"]`:                            14,
		`{"text":"no base64: ` + patch + `"}`:                          1,
		`["` + base64.StdEncoding.EncodeToString([]byte("{?,")) + `"]`: 3,
	} {
		v := Values{Base64: true}
		for i := range text {
			_, _ = v.Write([]byte(text[i : i+1]))
		}
		if v.Count() != want {
			t.Errorf("%s has %d values, not %d", text, v.Count(), want)
		}
	}
}

// The JSON values of a response are bounded too, in proportion to the values of the request.
func TestAnswersAreBoundedInValues(t *testing.T) {
	answered := func(answer, request string, again bool) error {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, answer)
		}))
		defer s.Close()
		c := &http.Client{Transport: LimitResponses(s.Client().Transport, 16<<20, 4)}
		body := io.Reader(strings.NewReader(request))
		if !again {
			body = io.MultiReader(body)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/hook", body)
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = int64(len(request))
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	patch := func(text string) string { return `"` + base64.StdEncoding.EncodeToString([]byte(text)) + `"` }
	bytes16 := strings.Repeat("x ", bytesPerValue/2)
	few, many := strings.Repeat(",", answerValues), strings.Repeat(",", answerValues+1)
	for name, x := range map[string]struct {
		answer, request string
		again, fails    bool
	}{
		"as many as may be":                {answer: few},
		"one more":                         {answer: many, fails: true},
		"one more, of a request with one":  {answer: many, request: "[", again: true},
		"five more, of a request with one": {answer: many + ",,,,", request: "[", again: true, fails: true},
		"four more, of a request's bytes":  {answer: many + ",,,", request: bytes16},
		"a patch of as many as may be":     {answer: patch(few)},
		"a patch of one more":              {answer: patch(many), fails: true},
		"five more, of a request's bytes":  {answer: many + ",,,,", request: bytes16, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			err := answered(x.answer, x.request, x.again)
			if fails := err != nil; fails != x.fails {
				t.Errorf("it fails: %v", err)
			} else if fails && (!strings.Contains(err.Error(), "/hook") || !strings.Contains(err.Error(), " values")) {
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

// Large responses have a bound together. Small responses are read nevertheless.
func TestConcurrentResponsesAreBounded(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		n, _ := strconv.ParseInt(req.URL.Query().Get("n"), 10, 64)
		_, _ = io.CopyN(w, zeros{}, n)
	}))
	t.Cleanup(s.Close)
	c := &http.Client{Transport: LimitResponses(s.Client().Transport, 4<<20, 0)}
	read := func(n int) (counted int64, err error) {
		t.Helper()
		before := reading.Load()
		resp, err := c.Get(fmt.Sprint(s.URL, "?n=", n))
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		counted = reading.Load() - before
		resp.Body.Close()
		if left := reading.Load(); left != before {
			t.Errorf("%d bytes are counted after Close", left-before)
		}
		return counted, err
	}
	for n, want := range map[int]int64{smallResponse: 0, smallResponse + 1000: 1000} {
		if counted, err := read(n); err != nil || counted != want {
			t.Errorf("%d bytes: %d are counted, %v", n, counted, err)
		}
	}
	reading.Add(maxReading)
	defer reading.Add(-maxReading)
	if _, err := read(smallResponse); err != nil {
		t.Errorf("a small response: %v", err)
	}
	if _, err := read(smallResponse + 1000); err == nil {
		t.Error("a large response is read beyond the bound of all")
	}
}
