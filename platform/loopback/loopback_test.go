package loopback

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/recovery"
)

func client(h http.HandlerFunc) *http.Client {
	c := ClientConfig(genericapifilters.WithRequestInfo(h, paths.RequestInfo), &user.DefaultInfo{Name: "jane"})
	return &http.Client{Transport: c.Transport}
}

// A request reaches its handler with its user and its whole body. The response is complete, and is streamed while the
// handler writes it.
func TestARequestIsAnsweredAsItIsWritten(t *testing.T) {
	next := make(chan string)
	c := client(func(w http.ResponseWriter, req *http.Request) {
		u, _ := request.UserFrom(req.Context())
		info, _ := request.RequestInfoFrom(req.Context())
		body, _ := io.ReadAll(req.Body)
		w.Header().Set("X-Who", u.GetName()+" "+info.Verb+" "+info.Resource+" "+string(body)+" "+req.URL.RawQuery)
		w.WriteHeader(http.StatusCreated)
		_ = http.NewResponseController(w).Flush()
		for text := range next {
			_, _ = io.WriteString(w, text)
		}
	})
	resp, err := c.Post("https://x/api/v1/namespaces/n/pods?dryRun=All", "text/plain", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get("X-Who"); resp.StatusCode != http.StatusCreated ||
		got != "jane create pods body dryRun=All" {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
	for _, want := range []string{"first", "second"} {
		next <- want
		got := make([]byte, len(want))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
			t.Errorf("%q %v, not %q", got, err, want)
		}
	}
	close(next)
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%q %v", rest, err)
	}
}

// A client that closes a response or cancels a request ends the handler. A panic cuts the response off.
func TestARequestEnds(t *testing.T) {
	ended := make(chan struct{}, 1)
	panics := map[string]any{"/abort": http.ErrAbortHandler, "/panic": "a bug"}
	c := client(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/silent" {
			<-req.Context().Done()
			ended <- struct{}{}
			return
		}
		if value, ok := panics[req.URL.Path]; ok {
			_, _ = io.WriteString(w, "half")
			panic(value)
		}
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		ended <- struct{}{}
	})
	resp, err := c.Get("https://x/watch")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	<-ended
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "https://x/silent", nil)
	cancel()
	if _, err := c.Do(req); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	<-ended
	before := testutil.ToFloat64(recovery.Metrics()[0])
	for path := range panics {
		if resp, err = c.Get("https://x" + path); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if !errors.Is(err, io.ErrUnexpectedEOF) || string(got) != "half" {
			t.Errorf("%s: %q %v", path, got, err)
		}
	}
	if n := testutil.ToFloat64(recovery.Metrics()[0]) - before; n != 1 { // an abort is no panic
		t.Errorf("%v panics are counted", n)
	}
}

// A request does not inherit the values of its caller's context, such as the audit context of a request that it serves.
func TestContextValuesAreNotInherited(t *testing.T) {
	type key struct{}
	inherited := make(chan any, 1)
	c := ClientConfig(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		inherited <- req.Context().Value(key{})
	}), &user.DefaultInfo{Name: "u"})
	ctx := context.WithValue(t.Context(), key{}, "of the caller")
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Host+"/api", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if v := <-inherited; v != nil {
		t.Errorf("the request has the value %v", v)
	}
}
