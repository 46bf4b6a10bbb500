package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/process"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
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
		Report: func(context.Context) *process.Report {
			return &process.Report{ID: "own", States: map[string]json.RawMessage{
				"large": json.RawMessage(`"` + string(make([]byte, maxReportState)) + `"`), "small": json.RawMessage(`1`)}}
		},
		Reports: func(context.Context) []*process.Report { return []*process.Report{{ID: "authn"}} },
	}}
	ids := func() (all []string) {
		for _, r := range g.reports(t.Context()) {
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
	r := &process.Report{}
	if err := json.Unmarshal(g.encodeReport(t.Context()), r); err != nil || len(r.States) != 1 ||
		r.Address != "192.0.2.1:443" {
		t.Errorf("%+v, %v", r, err)
	}
}

// Only GET of /metrics?view=processes has reports.
func TestReportsArePartOfMetrics(t *testing.T) {
	g := &Service{deps: Deps{
		Discovery: &reporter{},
		Report:    func(context.Context) *process.Report { return &process.Report{} },
		Reports:   func(context.Context) []*process.Report { return nil },
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
	h.ServeHTTP(w, httptest.NewRequest(http.MethodDelete, "/metrics?view=processes", nil))
	if w.Code != http.StatusTeapot {
		t.Errorf("DELETE: %d", w.Code)
	}
}
