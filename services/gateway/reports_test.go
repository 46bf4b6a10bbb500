package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/process"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/watch"
)

// reporter is a registry with the reports of gateways.
type reporter struct {
	registryv1.DiscoveryClient
	reports []*registryv1.GatewayReport
	err     error
}

func (r *reporter) GatewayReports(context.Context, *registryv1.GatewayReportsRequest,
	...grpc.CallOption) (*registryv1.GatewayReportsResponse, error) {
	return &registryv1.GatewayReportsResponse{Reports: r.reports}, r.err
}

// The page has this gateway, the processes of the other services, and the other gateways, each once. Without registry
// it lacks the other gateways. A heartbeat's report has no large states.
func TestReportsOfAllProcesses(t *testing.T) {
	now := time.Now()
	heartbeat := func(id string, at time.Time) *registryv1.GatewayReport {
		data, err := json.Marshal(&process.Report{ID: id, Time: at})
		if err != nil {
			t.Fatal(err)
		}
		return &registryv1.GatewayReport{Report: data, ReceivedUnixNanos: now.UnixNano()}
	}
	registry := &reporter{reports: []*registryv1.GatewayReport{
		heartbeat("own", now), heartbeat("other", now.Add(time.Minute)), heartbeat("ended", now),
		{Report: []byte("no JSON"), ReceivedUnixNanos: now.UnixNano()}}}
	registry.reports[2].ReceivedUnixNanos = now.Add(-maxReportAge - time.Second).UnixNano()
	g := &Service{external: "192.0.2.1:443", deps: Deps{
		Discovery: registry,
		Report: func(context.Context, process.Kind) *process.Report {
			return &process.Report{ID: "own", States: map[string]json.RawMessage{
				"large": json.RawMessage(`"` + string(make([]byte, maxReportState)) + `"`), "small": json.RawMessage(`1`)}}
		},
		Reports: func(context.Context, process.Kind) []*process.Report { return []*process.Report{{ID: "authn"}} },
	}}
	ids := func() (all []string) {
		for _, r := range g.reports(t.Context(), process.Shallow).Reports {
			all = append(all, r.ID)
			if r.ID == "other" && (r.SkewSeconds < 59 || r.SkewSeconds > 60) {
				t.Errorf("the clock of the other gateway differs by %v s", r.SkewSeconds)
			}
		}
		return all
	}
	if got := ids(); len(got) != 3 || got[0] != "own" || got[1] != "authn" || got[2] != "other" {
		t.Errorf("%q", got)
	}
	registry.err = errors.New("away")
	if got := ids(); len(got) != 2 {
		t.Errorf("%q", got)
	}
	encode, r := g.reportEncoder(t.Context()), &process.Report{}
	called := time.Now() // a call encodes a report that may be 10 s old
	if err := json.Unmarshal(encode(), r); err != nil || len(r.States) != 1 || r.Address != "192.0.2.1:443" {
		t.Errorf("%+v, %v", r, err)
	}
	if r.Time.Before(called) {
		t.Errorf("the clock is that of %v before the call", called.Sub(r.Time))
	}
}

// Only GET of /metrics?view=processes has reports. With deep=true, all reports are deep.
func TestReportsArePartOfMetrics(t *testing.T) {
	g := &Service{deps: Deps{
		Discovery: &reporter{},
		Report: func(_ context.Context, kind process.Kind) *process.Report {
			return &process.Report{ID: "own" + string(kind)}
		},
		Reports: func(_ context.Context, kind process.Kind) []*process.Report {
			return []*process.Report{{ID: "other" + string(kind)}}
		},
	}}
	metrics := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }
	h := g.withReports(http.HandlerFunc(metrics))
	for target, want := range map[string]int{
		"/metrics?view=processes": http.StatusOK, "/metrics": http.StatusTeapot, "/metrics?view=x": http.StatusTeapot,
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
		if w.Code != want {
			t.Errorf("%s: %d, want %d", target, w.Code, want)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics?view=processes&deep=true", nil))
	if body := w.Body.String(); !strings.Contains(body, `"owntrue"`) || !strings.Contains(body, `"othertrue"`) {
		t.Error(body)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodDelete, "/metrics?view=processes", nil))
	if w.Code != http.StatusTeapot {
		t.Errorf("DELETE: %d", w.Code)
	}
}

// The console is served to users that may get its path, unless --console=false.
func TestConsole(t *testing.T) {
	g := newTestGateway(t, &fakeServices{})
	g.awaitReady(t)
	off := newTestGateway(t, &fakeServices{}, "--console=false")
	off.awaitReady(t)
	for _, c := range []struct {
		g                   *Service
		method, path, token string
		code                int
	}{
		{g, "GET", "/watershed", "t", 200},
		{g, "GET", "/watershed/watches", "t", 200},
		{g, "HEAD", "/watershed/resources/", "t", 200},
		{g, "GET", "/watershed", "", 403},
		{g, "GET", "/watershed/watches", "", 403},
		{g, "GET", "/watershed/nothing", "t", 404},
		{g, "POST", "/watershed", "t", 405},
		{off, "GET", "/watershed", "t", 404},
		{off, "GET", "/watershed", "", 403},
	} {
		if code, body, _ := c.g.doRequest(c.method, c.path, c.token); code != c.code {
			t.Errorf("%s %s with %q: %d, want %d: %.200s", c.method, c.path, c.token, code, c.code, body)
		}
	}
}

// A heartbeat has the gateway's state for other consoles. Consoles read it, and the reports at /metrics are without it.
func TestConsolesOfOtherGateways(t *testing.T) {
	registry := &reporter{}
	g := &Service{usages: new(watch.Usages), slow: new(routing.SlowRequests), deps: Deps{
		Discovery: registry,
		Report: func(context.Context, process.Kind) *process.Report {
			return &process.Report{Host: "own", States: map[string]json.RawMessage{}}
		},
		Reports: func(context.Context, process.Kind) []*process.Report { return nil },
	}}
	other := heartbeatReport{&process.Report{ID: "other", Host: "other"},
		json.RawMessage(`{"open":7,"usages":1,"watches":[{"user":"alice"}]}`)}
	data, err := json.Marshal(other)
	if err != nil {
		t.Fatal(err)
	}
	registry.reports = []*registryv1.GatewayReport{{Report: data, ReceivedUnixNanos: time.Now().UnixNano()}}
	all, err := g.consoleCluster(t.Context())
	if err != nil || len(all.Gateways) != 2 || all.Gateways[0].Name != "own/0" || all.Gateways[1].Open != 7 ||
		all.Gateways[1].Watches[0].User != "alice" {
		t.Errorf("%+v, %v", all, err)
	}
	w := httptest.NewRecorder()
	g.withReports(nil).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics?view=processes", nil))
	if body := w.Body.String(); w.Code != http.StatusOK || !strings.Contains(body, "other") ||
		strings.Contains(body, "alice") {
		t.Errorf("%d %s", w.Code, body)
	}
	own := heartbeatReport{}
	if err := json.Unmarshal(g.reportEncoder(t.Context())(), &own); err != nil || own.Console == nil {
		t.Errorf("%+v, %v", own, err)
	}
}

// During an upgrade, the gateways of the release before serve heartbeats of this release at /metrics. They decode
// process.Report, so its fields have no state for consoles.
func TestOlderGatewaysServeNoNamesOfUsers(t *testing.T) {
	state := json.RawMessage(`{"watches":[{"user":"alice"}]}`)
	data, err := json.Marshal(heartbeatReport{&process.Report{ID: "new"}, state})
	if err != nil || !strings.Contains(string(data), "alice") {
		t.Fatalf("%s, %v", data, err)
	}
	older, err := process.DecodeReport(data, time.Now(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	process.WriteReports(w, older)
	if body := w.Body.String(); !strings.Contains(body, `"new"`) || strings.Contains(body, "alice") {
		t.Error(body)
	}
}
