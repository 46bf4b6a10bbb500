package gateway

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"time"

	"watershed.dev/platform/process"
	"watershed.dev/platform/recovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// maxReportState bounds the state of a service in a heartbeat in bytes, and maxReport the report: etcd stores both.
	// Registry stores no larger report.
	maxReportState = 4 << 10
	maxReport      = 64 << 10
	// maxReportAge is the age from which a report of another gateway is ignored: its next heartbeat is overdue. The
	// gateway has ended, or its key is of a restored snapshot.
	maxReportAge = heartbeatPeriod + 5*time.Second
	// reportsTimeout bounds the reading of other gateways' reports.
	reportsTimeout = 2 * time.Second
)

// report returns the report of this gateway's process.
func (g *Service) report(ctx context.Context) *process.Report {
	r := g.deps.Report(ctx)
	r.Address = g.external
	return r
}

// encodeReport returns the report for a heartbeat, without large states, and without certificates and flags if it is
// too large with them.
func (g *Service) encodeReport(ctx context.Context) (data []byte) {
	defer recovery.ToError("reporting the process", new(error))
	r := g.report(ctx)
	for service, state := range r.States {
		if len(state) > maxReportState {
			delete(r.States, service)
		}
	}
	data, err := json.Marshal(r)
	if len(data) > maxReport {
		r.Certificates, r.Flags = nil, nil
		data, err = json.Marshal(r)
	}
	if err != nil {
		slog.Warn("The heartbeat has no report", "error", err)
	}
	return data
}

// withReports serves the reports of all processes at /metrics?view=processes, and metrics otherwise. The path is that
// of metrics, so that clients with the permission to get metrics may get the reports.
func (g *Service) withReports(metrics http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if g.deps.Report == nil || req.Method != http.MethodGet || req.URL.Query().Get("view") != "processes" {
			metrics.ServeHTTP(w, req)
			return
		}
		all, err := g.sharedReports.Get(req.Context(), "", func(ctx context.Context) ([]*process.Report, error) {
			return g.reports(ctx), nil
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		process.WriteReports(w, all...)
	})
}

// reports returns the reports of this process, of the processes of the other services, and of the other gateways.
func (g *Service) reports(ctx context.Context) []*process.Report {
	var others []*process.Report
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer recovery.ToError("reading the reports of gateways", new(error))
		others = g.otherGateways(ctx)
	}()
	all := append([]*process.Report{g.report(ctx)}, g.deps.Reports(ctx)...)
	<-read
	for _, r := range others {
		if r.ID != all[0].ID {
			all = append(all, r)
		}
	}
	return all
}

// otherGateways returns the reports of the gateways' last heartbeats. If registry does not respond, there are none.
func (g *Service) otherGateways(ctx context.Context) (all []*process.Report) {
	ctx, cancel := context.WithTimeout(ctx, reportsTimeout)
	defer cancel()
	resp, err := g.deps.Discovery.GatewayReports(ctx, &registryv1.GatewayReportsRequest{})
	if err != nil {
		slog.Debug("The reports of other gateways cannot be read", "error", err)
		return nil
	}
	for _, kept := range resp.Reports {
		received := time.Unix(0, kept.ReceivedUnixNanos)
		if time.Since(received) > maxReportAge {
			continue
		}
		if r, err := process.DecodeReport(kept.Report, received.Add(-heartbeatTimeout), received); err == nil {
			all = append(all, r)
		}
	}
	return all
}
