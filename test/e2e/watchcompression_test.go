package e2e

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// TestWatchCompression watches with and without gzip, over HTTP/1.1 and HTTP/2. The contents are the same, a compressed
// body is a single gzip member with its trailer, and client-go reads each event when it comes.
func TestWatchCompression(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--watch-compression")
	maps := s.Client().CoreV1().ConfigMaps("default")
	create := func(name string) {
		t.Helper()
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
		m.Data = map[string]string{"pad": strings.Repeat(name+" ", 500)}
		if _, err := maps.Create(t.Context(), m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	create("first")
	initial, yes := "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", true
	bodies := map[string]chan []byte{}
	for _, http2 := range []bool{false, true} {
		for _, encoding := range []string{"identity", "gzip"} {
			name := fmt.Sprintf("HTTP/2: %v, %s", http2, encoding)
			resp := watchRaw(t, s, http2, encoding, "/api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=30&"+initial)
			if got := resp.Header.Get("Content-Encoding") == "gzip"; got != (encoding == "gzip") {
				t.Errorf("%s: %v", name, resp.Header)
			}
			bodies[name] = make(chan []byte, 1)
			go func() {
				defer resp.Body.Close()
				data, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				bodies[name] <- data
			}()
		}
	}
	w, err := maps.Watch(t.Context(), metav1.ListOptions{ // client-go accepts gzip
		SendInitialEvents:    &yes,
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
		AllowWatchBookmarks:  true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		if m, ok := e.Object.(*corev1.ConfigMap); ok && m.Annotations[metav1.InitialEventsAnnotationKey] != "" {
			break
		}
	}
	for i := range 3 { // each event comes before the next write
		name := fmt.Sprint("event-", i)
		create(name)
		for e := range w.ResultChan() {
			if m, ok := e.Object.(*corev1.ConfigMap); ok && m.Name == name {
				break
			}
		}
	}
	var plain string
	for name, body := range bodies {
		data := <-body
		if strings.HasSuffix(name, "gzip") {
			data = gunzip(t, data)
		}
		if text := withoutBookmarks(data); plain == "" {
			plain = text
		} else if text != plain {
			t.Errorf("%s: %d bytes of events, and others have %d", name, len(text), len(plain))
		}
	}
	if n := strings.Count(plain, `"name":"event-`); n != 3 {
		t.Errorf("%d of 3 events", n)
	}
}

// watchRaw opens a watch whose body the client does not decode.
func watchRaw(t *testing.T, s *harness.Server, http2 bool, encoding, path string) *http.Response {
	t.Helper()
	config := s.Config()
	certificates, err := rest.TLSConfigFor(config)
	if err != nil {
		t.Fatal(err)
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(http2)
	transport := &http.Transport{TLSClientConfig: certificates, Protocols: protocols, DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, config.Host+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", encoding)
	resp, err := transport.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	return resp
}

// gunzip returns the contents of a gzip body with a single member.
func gunzip(t *testing.T, data []byte) []byte {
	t.Helper()
	from := bytes.NewReader(data)
	r, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	r.Multistream(false)
	plain, err := io.ReadAll(r)
	if err != nil || from.Len() > 0 {
		t.Fatalf("%v, and %d bytes after the body", err, from.Len())
	}
	return plain
}

// withoutBookmarks returns the lines of a watch except bookmarks, whose times differ between watches.
func withoutBookmarks(lines []byte) string {
	var kept strings.Builder
	for line := range strings.Lines(string(lines)) {
		if !strings.HasPrefix(line, `{"type":"BOOKMARK"`) {
			kept.WriteString(line)
		}
	}
	return kept.String()
}
