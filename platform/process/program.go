package process

import (
	"context"
	"net/http"
	"slices"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
	processv1 "watershed.dev/proto/watershed/process/v1"
)

// xdsProgram is the name of the xDS server in its certificate.
const xdsProgram = "xds"

// programs are the names of the programs without services.
var programs = []string{"etcd", "nats", xdsProgram}

// Program is a process without services: an etcd member, a NATS server or an xDS server.
type Program struct {
	// Name is in programs, and Address is the address that clients use.
	Name, Address string
	ID            *rpc.TLS
	Flags         *pflag.FlagSet
	// NotReady returns why the program is not ready, or nil.
	NotReady func() error
}

// Report returns the state of the process. Both kinds of reports are the same.
func (p *Program) Report(context.Context, Kind) *Report {
	r := newReport([]string{p.Name}, p.Address, p.Flags)
	if err := p.NotReady(); err != nil {
		r.NotReady[p.Name] = err.Error()
	}
	r.Certificates = certificatesOf(p.ID)
	return r
}

// RegisterProcesses registers the contract of a process whose report is the result of report.
func RegisterProcesses(r grpc.ServiceRegistrar, report func(context.Context, Kind) *Report) {
	processv1.RegisterProcessesServer(r, &processes{report: report})
}

// ReportPage serves a process's report.
func ReportPage(report func(context.Context, Kind) *Report) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		WriteReports(w, report(r.Context(), KindOf(r)))
	})
}

// WithPrograms returns reports, and the reports of the programs that only some of these processes may call, each once.
func WithPrograms(all []*Report) []*Report {
	seen := map[string]bool{}
	for _, r := range all {
		for _, p := range r.Programs {
			if !seen[p.ID] {
				p.SkewSeconds += r.SkewSeconds // relative to the process that received r
				all = append(all, p)
			}
			seen[p.ID] = true
		}
		r.Programs = nil
	}
	return all
}

// onlyPrograms returns the reports of programs. A service's process may not report other services.
func onlyPrograms(all []*Report) []*Report {
	return slices.DeleteFunc(all, func(r *Report) bool {
		r.States, r.Programs = nil, nil
		return len(r.Services) != 1 || !slices.Contains(programs, r.Services[0])
	})
}
