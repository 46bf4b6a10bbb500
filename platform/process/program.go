package process

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

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

// Report returns the state of the process. All kinds of reports are the same.
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

// Bounds of reports of programs, whose senders may be broken or hostile: the bytes of a report, and the number in a
// report of a service's process.
const (
	maxProgramBytes = 64 << 10
	maxPrograms     = 64
)

// Programs are reports of programs.
type Programs []*Report

// UnmarshalJSON implements json.Unmarshaler. It decodes the first maxPrograms reports, and omits reports that
// DecodeProgram refuses.
func (all *Programs) UnmarshalJSON(data []byte) error {
	var reports []json.RawMessage
	if err := json.Unmarshal(data, &reports); err != nil {
		return err
	}
	*all = nil
	for _, data := range reports[:min(len(reports), maxPrograms)] {
		if r, err := decodeProgram(data, programs); err == nil {
			*all = append(*all, r)
		}
	}
	return nil
}

// DecodeProgram decodes the report of a program, as DecodeReport does, without states and programs. It returns an error
// for another program or service, and for more than 64 KB.
func DecodeProgram(name string, data []byte, sent, received time.Time) (*Report, error) {
	r, err := decodeProgram(data, []string{name})
	if err == nil {
		r.CompareClock(sent, received)
	}
	return r, err
}

func decodeProgram(data []byte, names []string) (*Report, error) {
	if len(data) > maxProgramBytes {
		return nil, fmt.Errorf("the report of a program has %d bytes, more than %d", len(data), maxProgramBytes)
	}
	var r struct {
		Report

		States   json.RawMessage `json:"states"` // instead of the report's
		Programs json.RawMessage `json:"programs"`
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if len(r.Services) != 1 || !slices.Contains(names, r.Services[0]) {
		return nil, fmt.Errorf("the report is of %q, want %q", r.Services, names)
	}
	return &r.Report, nil
}
