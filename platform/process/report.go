package process

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime/metrics"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
	processv1 "watershed.dev/proto/watershed/process/v1"
)

// Report is the state of a process, for `watershed status` and `watershed check`. The processes of a gateway's services
// send theirs by Processes.Report, and gateways by their heartbeats. The debug address serves it as /report.
type Report struct {
	// ID is unique to a run of the process. Host is the name of its machine or pod.
	ID   string `json:"id,omitempty"`
	Host string `json:"host,omitempty"`
	PID  int    `json:"pid,omitempty"`
	// Services are the names of the process's services. Address is the address of their RPCs, or of the gateway.
	Services []string `json:"services"`
	Address  string   `json:"address,omitempty"`
	// Error is why there is no report of the process at Address. The fields below are then empty.
	Error string `json:"error,omitempty"`

	Version    string    `json:"version,omitempty"`
	Kubernetes string    `json:"kubernetes,omitempty"`
	Started    time.Time `json:"started"`
	// Time is the process's clock. SkewSeconds is its difference to the clock of the process that received the report.
	Time        time.Time `json:"time"`
	SkewSeconds float64   `json:"skewSeconds,omitempty"`
	// NotReady has the reason of each service that is not ready.
	NotReady map[string]string `json:"notReady,omitempty"`
	// MemoryBytes is the memory that Go's runtime has mapped and not returned.
	MemoryBytes uint64 `json:"memoryBytes,omitempty"`
	// RequestsPerSecond and P99Seconds are of the last 10 to 20 s: requests of clients at a gateway, otherwise RPCs.
	// Streams are not counted.
	RequestsPerSecond float64 `json:"requestsPerSecond"`
	P99Seconds        float64 `json:"p99Seconds"`
	// Flags are the flags that are set, with their values, without the passwords of URLs.
	Flags        map[string]string `json:"flags,omitempty"`
	Certificates []pki.Described   `json:"certificates,omitempty"`
	Disks        []Disk            `json:"disks,omitempty"`
	// States has the states of services, such as registry.State.
	States map[string]json.RawMessage `json:"states,omitempty"`
	// Programs are the reports of the programs that only this process may call: of etcd and NATS, at a registry.
	Programs Programs `json:"programs,omitempty"`
}

// Disk is the file system of a directory that a flag names.
type Disk struct {
	Flag       string `json:"flag"`
	Path       string `json:"path"`
	FreeBytes  uint64 `json:"freeBytes"`
	TotalBytes uint64 `json:"totalBytes"`
}

// Name returns the displayed name of the process: its host and PID, or its address.
func (r *Report) Name() string {
	if r.Host == "" {
		return r.Address
	}
	return fmt.Sprintf("%s/%d", r.Host, r.PID)
}

// State decodes the state of a service, and reports if the report has it.
func (r *Report) State(service string, state any) bool {
	return r.States[service] != nil && json.Unmarshal(r.States[service], state) == nil
}

var (
	started   = time.Now()
	processID = rand.Text()
)

// Kind is the kind of a report.
type Kind string

// Shallow reports have each service's State. Deep reports have DeepState. Own reports are shallow, without programs.
const (
	Shallow Kind = ""
	Deep    Kind = "true"
	Own     Kind = "own"
)

// DeepQuery is the query parameter for the kind of the requested reports.
const DeepQuery = "deep"

// KindOf returns the kind of the reports that a request selects.
func KindOf(r *http.Request) Kind {
	if Kind(r.URL.Query().Get(DeepQuery)) == Deep {
		return Deep
	}
	return Shallow
}

// DeepTimeout bounds a service's DeepState. A gateway responds some seconds later, within the 1 m of --request-timeout.
const DeepTimeout = 40 * time.Second

// timeout bounds a report of another process.
func (k Kind) timeout() time.Duration {
	if k == Deep {
		return DeepTimeout + reportTimeout
	}
	return reportTimeout
}

// Report returns the state of the process.
func (p *Process) Report(ctx context.Context, kind Kind) *Report {
	r := newReport(p.modules.Names(), p.network.address, p.flags)
	traffic := &rpc.Traffic
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, s := range p.services {
		if err := s.ready(ctx); err != nil {
			r.NotReady[s.Name] = err.Error()
		}
		built := s.Get()
		if built == nil {
			continue
		}
		traffic = cmp.Or(built.Traffic, traffic)
		if built.Programs != nil && kind != Own {
			wg.Go(func() {
				defer recovery.ToError("reading the reports of programs", new(error))
				programs := built.Programs(ctx)
				mu.Lock()
				defer mu.Unlock()
				r.Programs = append(r.Programs, programs...)
			})
		}
		stateOf := built.State
		if kind == Deep && built.DeepState != nil {
			stateOf = built.DeepState
		}
		if stateOf == nil {
			continue
		}
		wg.Go(func() {
			defer recovery.ToError("reporting the state of "+s.Name, new(error))
			state, err := json.Marshal(stateOf(ctx))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				r.States[s.Name] = state
			}
		})
	}
	wg.Wait()
	perSecond, p99 := traffic.Recent()
	r.RequestsPerSecond, r.P99Seconds = perSecond, p99.Seconds()
	r.Certificates = p.certificates()
	r.Time = time.Now()
	return r
}

// newReport returns the part of a report that every process has.
func newReport(services []string, address string, flags *pflag.FlagSet) *Report {
	host, _ := os.Hostname()
	sample := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(sample)
	return &Report{
		ID:          processID,
		Host:        host,
		PID:         os.Getpid(),
		Services:    services,
		Address:     address,
		Version:     version.Release(),
		Kubernetes:  version.Kubernetes,
		Started:     started,
		Time:        time.Now(),
		NotReady:    map[string]string{},
		MemoryBytes: sample[0].Value.Uint64() - sample[1].Value.Uint64(),
		Flags:       changedFlags(flags),
		Disks:       disks(flags),
		States:      map[string]json.RawMessage{},
	}
}

// changedFlags returns the flags that are set, without credentials.
func changedFlags(fs *pflag.FlagSet) map[string]string {
	all := map[string]string{}
	if fs == nil {
		return all
	}
	fs.Visit(func(f *pflag.Flag) {
		all[f.Name] = Redact(f.Value.String())
		if len(f.Annotations["classified"]) > 0 { // as in /flagz
			all[f.Name] = "CLASSIFIED"
		}
	})
	return all
}

// credentials matches the user information of the URLs in a list.
var credentials = regexp.MustCompile(`[^\s,\[\]/#]+@`)

// Redact returns a text, such as a list of URLs or an error, without the user information of its URLs.
func Redact(text string) string { return credentials.ReplaceAllString(text, "xxxxx@") }

// disks returns the file systems of the directories that flags name, each once.
func disks(fs *pflag.FlagSet) (all []Disk) {
	seen := map[syscall.Fsid]bool{}
	for _, name := range []string{"data-dir", "audit-log-path", "xds-cache-dir"} {
		path := ""
		if fs != nil && fs.Lookup(name) != nil {
			path = fs.Lookup(name).Value.String()
		}
		if name == "audit-log-path" && path != "" {
			path = filepath.Dir(path)
		}
		if path == "" {
			continue
		}
		d, id, err := DiskOf("--"+name, path)
		if err != nil || seen[id] {
			continue
		}
		seen[id] = true
		all = append(all, d)
	}
	return all
}

// DiskOf returns the file system of a path that a flag names, and its ID.
func DiskOf(flag, path string) (d Disk, id syscall.Fsid, err error) {
	var st syscall.Statfs_t
	err = syscall.Statfs(path, &st)
	return Disk{flag, path, st.Bavail * uint64(st.Bsize), st.Blocks * uint64(st.Bsize)}, st.Fsid, err
}

// processes implements the contract of every process.
type processes struct {
	processv1.UnimplementedProcessesServer
	report func(context.Context, Kind) *Report
}

// Report implements processv1.ProcessesServer.
func (s *processes) Report(ctx context.Context, r *processv1.ReportRequest) (*processv1.ReportResponse, error) {
	kind := Shallow
	if r.Deep {
		kind = Deep
	}
	report, err := json.Marshal(s.report(ctx, kind))
	return &processv1.ReportResponse{Report: report}, err
}

// reportTimeout bounds a shallow report of another process.
const reportTimeout = 4 * time.Second

// reports returns the reports of the other processes whose services the process calls, and of the xDS servers. service
// is the caller.
func (p *Process) reports(ctx context.Context, service string, kind Kind) []*Report {
	ctx, cancel := context.WithTimeout(ctx, kind.timeout())
	defer cancel()
	at := map[string][]string{} // services by address
	for peer := range p.callers() {
		for _, address := range p.network.replicas(peer).AddressesOf(peer) {
			at[address] = append(at[address], peer)
		}
	}
	for _, address := range p.network.xdsServers {
		at[address] = []string{xdsProgram}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []*Report
	for address, services := range at {
		slices.Sort(services)
		wg.Go(func() {
			defer recovery.ToError("reading the report of a process", new(error))
			r, err := p.reportAt(ctx, service, services[0], address, kind)
			if status.Code(err) == codes.Unimplemented { // an xDS server of an earlier release
				return
			}
			if err != nil {
				r = &Report{Services: services, Error: err.Error()}
			}
			r.Address, r.Services = address, services // the certificate proves no others
			maps.DeleteFunc(r.States, func(service string, _ json.RawMessage) bool {
				return !slices.Contains(services, service)
			})
			if !slices.Contains(services, "registry") { // only registry may call programs
				r.Programs = nil
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, r)
		})
	}
	wg.Wait()
	return all
}

// reportAt returns the report of the process at an address.
func (p *Process) reportAt(ctx context.Context, from, to, address string, kind Kind) (*Report, error) {
	conn, err := rpc.DialReplica(p.identity(from), to, address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	sent := time.Now()
	resp, err := processv1.NewProcessesClient(conn).Report(ctx, &processv1.ReportRequest{Deep: kind == Deep})
	if err != nil {
		return nil, err
	}
	return DecodeReport(resp.Report, sent, time.Now())
}

// maxReportBytes bounds the report of a service's process.
const maxReportBytes = 2 << 20

// DecodeReport decodes a report that was requested at sent and received at received, and compares the clocks. It
// returns an error for a report above 2 MB.
func DecodeReport(data []byte, sent, received time.Time) (*Report, error) {
	if len(data) > maxReportBytes {
		return nil, fmt.Errorf("the report has %d bytes, more than %d", len(data), maxReportBytes)
	}
	r := &Report{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, err
	}
	r.CompareClock(sent, received)
	return r, nil
}

// CompareClock sets SkewSeconds. The report's time is between sent and received if the clocks agree.
func (r *Report) CompareClock(sent, received time.Time) {
	r.SkewSeconds = 0
	switch {
	case r.Time.Before(sent):
		r.SkewSeconds = r.Time.Sub(sent).Seconds()
	case r.Time.After(received):
		r.SkewSeconds = r.Time.Sub(received).Seconds()
	}
}

// ReportsType is the media type of reports. A server that is no gateway sends metrics instead.
const ReportsType = "application/json"

// WriteReports writes reports as a JSON list.
func WriteReports(w http.ResponseWriter, all ...*Report) {
	w.Header().Set("Content-Type", ReportsType)
	_ = json.NewEncoder(w).Encode(all)
}
