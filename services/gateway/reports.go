package gateway

import (
	"context"
	"encoding/json"
	"log/slog"
	"math"
	"net/http"
	"time"

	"watershed.dev/platform/process"
	"watershed.dev/platform/recovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/console"
)

const (
	// maxReportState bounds the state of a service in a heartbeat in bytes, and maxReport the report: etcd stores both.
	// Registry stores no larger report.
	maxReportState = 4 << 10
	maxReport      = 64 << 10
	// maxConsole bounds the state for the consoles of other gateways in a heartbeat, in bytes.
	maxConsole = 12 << 10
	// maxSlowRequests bounds the slow requests of this state.
	maxSlowRequests = 8
	// maxReportAge is the age from which a report of another gateway is ignored: its next heartbeat is overdue. The
	// gateway has ended, or its key is of a restored snapshot.
	maxReportAge = heartbeatPeriod + 5*time.Second
	// reportsTimeout bounds the reading of other gateways' reports.
	reportsTimeout = 2 * time.Second
)

// heartbeatReport is the report in a heartbeat. Console is the state for the consoles of other gateways. It names
// users, so it is not in States: clients with the permission to get metrics receive Report, also from older gateways.
type heartbeatReport struct {
	*process.Report
	Console json.RawMessage `json:"console,omitempty"`
}

// report returns the report of this gateway's process.
func (g *Service) report(ctx context.Context, kind process.Kind) *process.Report {
	r := g.deps.Report(ctx, kind)
	r.Address = g.external
	return r
}

// reportEncoder returns the encoder of a report for heartbeats: without large states, and without certificates and
// flags if it is too large with them. The encoder sets the report's time, with which the receiver compares its clock.
// After a panic, the encoder is nil, or returns nil.
func (g *Service) reportEncoder(ctx context.Context) (encode func() []byte) {
	defer recovery.ToError("reporting the process", new(error))
	r := heartbeatReport{Report: g.report(ctx, process.Own)}
	for service, state := range r.States {
		if len(state) > maxReportState {
			delete(r.States, service)
		}
	}
	if g.usages != nil {
		state, err := g.consoleState(maxSlowRequests).Encode(maxConsole)
		if err != nil {
			slog.Warn("The heartbeat has no state for consoles", "error", err)
		} else {
			r.Console = state
		}
	}
	return func() (data []byte) {
		defer recovery.ToError("reporting the process", new(error))
		r.Time = time.Now()
		data, err := console.Marshal(r)
		if len(data) > maxReport {
			r.Certificates, r.Flags = nil, nil
			data, err = console.Marshal(r)
		}
		if err != nil {
			slog.Warn("The heartbeat has no report", "error", err)
		}
		return data
	}
}

// withReports serves the reports of all processes at /metrics?view=processes, and metrics otherwise. The path is that
// of metrics, so that clients with the permission to get metrics may get the reports. With deep=true, the reports are
// deep.
func (g *Service) withReports(metrics http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if g.deps.Report == nil || req.Method != http.MethodGet || req.URL.Query().Get("view") != "processes" {
			metrics.ServeHTTP(w, req)
			return
		}
		all, err := g.readCluster(req.Context(), process.KindOf(req))
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		process.WriteReports(w, all.Reports...)
	})
}

// consoleState returns this gateway's state for consoles, with at most n slow requests.
func (g *Service) consoleState(n int) *console.Gateway {
	return console.NewGateway(g.usages.Snapshot(time.Now()), g.slow.Newest(n))
}

// consoleCluster returns the state for this gateway's console.
func (g *Service) consoleCluster(ctx context.Context) (*console.Cluster, error) {
	all, err := g.readCluster(ctx, process.Shallow)
	if err != nil {
		return nil, err
	}
	own := g.consoleState(math.MaxInt)
	own.Name = all.Reports[0].Name()
	return &console.Cluster{Reports: all.Reports, Gateways: append([]*console.Gateway{own}, all.Gateways...)}, nil
}

// readCluster returns the reports of all processes, and the states for consoles of the other gateways. Concurrent calls
// share a reading.
func (g *Service) readCluster(ctx context.Context, kind process.Kind) (*console.Cluster, error) {
	return g.sharedReports.Get(ctx, string(kind), func(ctx context.Context) (*console.Cluster, error) {
		return g.reports(ctx, kind), nil
	})
}

// reports returns the reports of this process, of the processes of the other services, and of the other gateways, and
// the states of the other gateways.
func (g *Service) reports(ctx context.Context, kind process.Kind) *console.Cluster {
	var others []heartbeatReport
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer recovery.ToError("reading the reports of gateways", new(error))
		others = g.otherGateways(ctx)
	}()
	all := &console.Cluster{Reports: append([]*process.Report{g.report(ctx, kind)}, g.deps.Reports(ctx, kind)...)}
	<-read
	for _, r := range others {
		if r.ID == all.Reports[0].ID {
			continue
		}
		all.Reports = append(all.Reports, r.Report)
		other := &console.Gateway{}
		if r.Console != nil && json.Unmarshal(r.Console, other) == nil {
			other.Name = r.Name()
			all.Gateways = append(all.Gateways, other)
		}
	}
	all.Reports = process.WithPrograms(all.Reports)
	return all
}

// otherGateways returns the reports of the gateways' last heartbeats. If registry does not respond, there are none.
func (g *Service) otherGateways(ctx context.Context) (all []heartbeatReport) {
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
		r := heartbeatReport{Report: &process.Report{}}
		if err := json.Unmarshal(kept.Report, &r); err == nil {
			r.Programs = nil // only registry may call programs
			r.CompareClock(received.Add(-heartbeatTimeout), received)
			all = append(all, r)
		}
	}
	return all
}
