package console

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/process"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/watch"
)

// hostile is a name that a client may choose.
const hostile = `"><script>alert(1)</script>`

// testCluster is a cluster with a process of each service, whose gateway has these watches.
func testCluster(watches []watch.Usage) *Cluster {
	report := func(service, state string) *process.Report {
		return &process.Report{Host: "host", Services: []string{service}, Version: "v1", Started: time.Now(),
			MemoryBytes: 3e6, States: map[string]json.RawMessage{service: json.RawMessage(state)}}
	}
	gateway := NewGateway(watches, []routing.SlowRequest{{User: hostile, Verb: "list", Resource: "pods",
		Seconds: 1.5, Code: 200, Trace: "0102"}})
	gateway.Name = "host/0"
	socket := report("authn", `{}`)
	socket.Address = "unix:/directory/authn-1.rpc"
	socket.NotReady = map[string]string{"authn": "unix:///directory/etcd.sock"}
	return &Cluster{
		Reports: []*process.Report{
			report("gateway", `{}`),
			report("registry", `{"etcds":[{"alarms":["NOSPACE"],"members":[{"endpoint":"etcd:2379","leader":true,`+
				`"version":"3.6.0","bytes":2e6},{"endpoint":"unix:///directory/etcd.sock"}]}],`+
				`"logs":[{"publishing":true,"revision":41,"current":1,"wanted":3,`+
				`"maxBytes":1e9,"oldestSeconds":59}]}`),
			report("watchfanout", `{"ready":true,"revision":40,"behind":1,"lagMilliseconds":2.5,"bytes":5e6,`+
				`"slowest":[{"resource":"pods","query":"secret-query","waiting":17}]}`),
			{Address: "192.0.2.1:9", Services: []string{"authn"}, Error: hostile},
			socket,
			{Address: "unix:/directory/.a-b/watchfanout-1.rpc", Services: []string{"watchfanout"},
				Error: "desc =\n\tunix /directory/watchfanout-1.rpc: connect: refused"},
		},
		Gateways: []*Gateway{gateway},
	}
}

func get(t *testing.T, c *Console, target string) string {
	t.Helper()
	w := httptest.NewRecorder()
	c.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", target, w.Code, w.Body)
	}
	for name, want := range map[string]string{"Content-Security-Policy": "default-src 'none'", "X-Frame-Options": "DENY",
		"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"} {
		if !strings.HasPrefix(w.Header().Get(name), want) {
			t.Errorf("%s: %s: %q", target, name, w.Header().Get(name))
		}
	}
	body := w.Body.String()
	_, rest, _ := strings.Cut(body, "<style>")
	style, _, _ := strings.Cut(rest, "</style>")
	hash := sha256.Sum256([]byte(style))
	if !strings.Contains(w.Header().Get("Content-Security-Policy"), base64.StdEncoding.EncodeToString(hash[:])) {
		t.Errorf("%s: the policy does not allow the style sheet", target)
	}
	for _, text := range []string{"<script", "secret-query", "directory", "http://", "https://", " style="} {
		if strings.Contains(body, text) {
			t.Errorf("%s contains %q", target, text)
		}
	}
	for _, landmark := range []string{`<html lang="en">`, `<nav aria-label`, `<main id="main"`, `href="#main"`, `<h1>`,
		`aria-current="page"`} {
		if strings.Count(body, landmark) != 1 {
			t.Errorf("%s: %d times %s", target, strings.Count(body, landmark), landmark)
		}
	}
	if tables := strings.Count(body, "<table>"); strings.Count(body, "<caption") != tables ||
		strings.Count(body, "<th>") != 0 {
		t.Errorf("%s: a table has no caption, or a header has no scope", target)
	}
	return body
}

// Each page shows its part of the cluster. It escapes the texts of clients.
func TestPages(t *testing.T) {
	all := testCluster([]watch.Usage{{User: hostile, Resource: "pods", Watches: 3, Behind: 5, BytesPerSecond: 2500,
		Replicas: []string{"192.0.2.7:9"}}})
	c := &Console{Read: func(context.Context) (*Cluster, error) { return all, nil }}
	escaped := "&#34;&gt;&lt;script&gt;"
	for target, texts := range map[string][]string{
		"/watershed":                     {"0 of 2 ready", "response: " + escaped, "NOSPACE", ">unix:etcd.sock<"},
		"/watershed/watches":             {escaped, "<td>pods</td>", "2.5 kB", "192.0.2.7:9", "host/0"},
		"/watershed/watches?q=pod":       {escaped, `value="pod"`, "?q=pod&amp;refresh=5"},
		"/watershed/watches?q=" + "x%22": {"No watch matches", `value="x&#34;"`},
		"/watershed/watches?sort=user":   {`aria-sort="ascending"`, "sorted by user"},
		"/watershed/resources":           {"need a second view", ">pods</th>"},
		"/watershed/events?refresh=5":    {"2.5 ms", "5.0 MB", ">17</td>", `http-equiv="refresh" content="5"`},
		"/watershed/requests":            {escaped, "1.50 s", "0102", "500ms"},
		"/watershed/":                    {"Topology", "etcd:2379", "3.0 MB", ">unix:authn-1", "authn: unix:etcd.sock"},
		"/watershed/events":              {">unix:watchfanout-1.rpc<", "unix watchfanout-1.rpc: connect"},
	} {
		body := get(t, c, target)
		for _, text := range texts {
			if !strings.Contains(body, text) {
				t.Errorf("%s lacks %q: %s", target, text, body[strings.Index(body, "<main"):])
			}
		}
	}
}

// With 10,000 watches of different users a page and a heartbeat are bounded. They have the watches with the highest
// rates.
func TestManyWatches(t *testing.T) {
	var watches []watch.Usage
	for i := range 10000 {
		name := fmt.Sprint("user-", i, strings.Repeat("é", 60))
		rate := float64(i)
		watches = append(watches, watch.Usage{User: name, Resource: "pods", Watches: 2, BytesPerSecond: rate})
	}
	all := testCluster(watches)
	c := &Console{Read: func(context.Context) (*Cluster, error) { return all, nil }}
	body := get(t, c, "/watershed/watches")
	if len(body) > 200<<10 || strings.Count(body, "<tr>") != maxRows+1 || !strings.Contains(body, "user-9999é") ||
		!strings.Contains(body, "9800 further rows") || !strings.Contains(body, "20000 open watches") {
		t.Errorf("%d bytes, %d rows", len(body), strings.Count(body, "<tr>"))
	}
	const limit = 8 << 10
	data, err := all.Gateways[0].Encode(limit)
	g := &Gateway{}
	if err != nil || len(data) > limit || json.Unmarshal(data, g) != nil {
		t.Fatalf("%d bytes, %v", len(data), err)
	}
	if len(g.Watches) < 20 || g.Watches[0].BytesPerSecond != 9999 || g.Usages != 10000 || g.Open != 20000 {
		t.Errorf("%d of %d usages of %d watches", len(g.Watches), g.Usages, g.Open)
	}
	if text := string(data); !strings.Contains(text, hostile[1:]) {
		t.Errorf("%s lacks the slow request", text)
	}
	all.Gateways = append(all.Gateways, g)
	c = &Console{Read: c.Read}
	if body := get(t, c, "/watershed/watches"); !strings.Contains(body, fmt.Sprint("omit ", 10000-len(g.Watches))) {
		t.Error("the page does not state the number of omitted watches")
	}
}

// Names of characters that json.Marshal escapes have the space of other names. The slow requests leave two thirds of a
// heartbeat to the watches.
func TestNamesOfEscapedCharacters(t *testing.T) {
	state := func(name string) *Gateway {
		var watches []watch.Usage
		var slow []routing.SlowRequest
		for range 1000 {
			watches = append(watches, watch.Usage{User: name})
			slow = append(slow, routing.SlowRequest{User: name, Resource: strings.Repeat("\x01", 256)})
		}
		data, err := NewGateway(watches, slow).Encode(3 * maxSlowBytes)
		g := &Gateway{}
		if err != nil || len(data) > 3*maxSlowBytes || json.Unmarshal(data, g) != nil {
			t.Fatalf("%d bytes, %v", len(data), err)
		}
		return g
	}
	escaped, plain := state(strings.Repeat("<", 128)), state(strings.Repeat("x", 128))
	if n := len(escaped.Watches); n < 40 || n != len(plain.Watches) || len(escaped.Slow) != 2 {
		t.Errorf("%d watches, not %d, and %d slow requests", n, len(plain.Watches), len(escaped.Slow))
	}
}

// Clients share a reading of the cluster for maxAge. An error is not cached.
func TestReadsAreShared(t *testing.T) {
	reads, failure := 0, errors.New("away")
	c := &Console{Read: func(context.Context) (*Cluster, error) {
		reads++
		return testCluster(nil), failure
	}}
	w := httptest.NewRecorder()
	c.ServeHTTP(w, httptest.NewRequest(http.MethodGet, Root, nil))
	if w.Code != http.StatusServiceUnavailable {
		t.Errorf("%d", w.Code)
	}
	failure = nil
	for range 10 {
		get(t, c, Root+"/requests")
	}
	if reads != 2 {
		t.Errorf("%d reads", reads)
	}
}

// The rates of resources are of the time since the read before.
func TestRates(t *testing.T) {
	got := counts{Requests: 30, ResponseBytes: 100, Events: 5}.rate(counts{Requests: 10, ResponseBytes: 200}, 10)
	if got != (counts{Requests: 2, Events: .5}) {
		t.Errorf("%+v", got)
	}
	for size, want := range map[any]string{float64(0): "0 B", 999.4: "999 B", 1500.0: "1.5 kB", uint64(3e12): "3000.0 GB"} {
		if got := formatBytes(size); got != want {
			t.Errorf("%v: %s", size, got)
		}
	}
}
