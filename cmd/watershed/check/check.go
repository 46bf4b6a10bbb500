// Package check finds faults of a running Watershed, its etcd, its event log and its cluster. It also finds faults of a
// machine or a cluster before an installation. Read returns an Input, and Find decides from it without I/O. ReadPre and
// FindPre do this before an installation. The package changes nothing.
package check

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/services/registry/etcdstatus"
)

// Level is the level of a finding.
type Level int

// The levels. Skipped: the check could not run, for example because the user may not read the objects.
const (
	OK Level = iota
	Skipped
	Warning
	Error
)

var levels = []string{"ok", "skipped", "warning", "error"}

// String returns the name of the level.
func (l Level) String() string { return levels[l] }

// MarshalJSON implements json.Marshaler.
func (l Level) MarshalJSON() ([]byte, error) { return json.Marshal(l.String()) }

// Finding is the result of a check, or a fault that it found.
type Finding struct {
	// Check is the name of the check, which is also the heading of its paragraph.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Problem and Remedy are a line together. Remedy is empty without a fault.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy,omitempty"`
	Docs    string `json:"docs,omitempty"`
}

// page has a paragraph for each check.
const page = "docs/operators/check.md#"

// Input is the state that Find decides from.
type Input struct {
	Now time.Time
	// Reports are the reports of all processes, and Later the same, Pause later. ReportsError is why there are none.
	Reports, Later []*process.Report
	ReportsError   error
	// Deep are the deep reports of --deep, nil without the flag. DeepError is why there are none.
	Deep      []*process.Report
	DeepError error
	// Server is the URL of the gateway, Serving its serving certificate with the intermediate certificates, and Roots
	// the CA in the kubeconfig.
	Server  string
	Serving []*x509.Certificate
	Roots   *x509.CertPool
	// Etcd is the state of the etcd that flags name, or nil. Certificates are the files of flags.
	Etcd         *etcdstatus.Status
	Certificates []pki.Described
	// Cluster are the webhooks and APIServices, and ClusterError is why they cannot be read.
	Cluster      Cluster
	ClusterError error
}

// Pause is the time between the two readings of reports. A replica lags if it lacks revisions after the pause that etcd
// had before it.
const Pause = time.Second

// check finds faults in an input. ok is the problem of a finding without a fault.
type check[T any] struct {
	name, ok string
	find     func(T) []Finding
}

// checks are the checks of a running Watershed in the order of the output.
var checks = []check[*Input]{
	{"processes", "every process responds and is ready", processes},
	{"versions", "all processes have the same version", versions},
	{"flags", "the processes of a service have the same flags", flags},
	{"certificates", "no certificate ends soon", certificates},
	{"ca", "each certificate is signed by the CA that its clients have", authorities},
	{"clocks", "the clocks agree", clocks},
	{"disks", "the disks have space", disks},
	{"etcd", "etcd has a quorum, space and no alarm", etcd},
	{"event-log", "a registry publishes the event log, and NATS holds it", eventLog},
	{"watch-tier", "no replica of the watch tier lags", watchTier},
	{"objects", "", objects},
	{"webhooks", "the admission webhooks respond", webhooks},
	{"apiservices", "the APIServices are available", apiServices},
}

// Find returns the findings of all checks. A check without a fault has a finding of level OK. The check of objects has
// findings with --deep only.
func Find(in *Input) []Finding { return run(checks, in) }

// run returns the findings of checks.
func run[T any](checks []check[T], in T) (all []Finding) {
	for _, c := range checks {
		found := c.find(in)
		if len(found) == 0 && c.ok != "" {
			found = []Finding{{Level: OK, Problem: c.ok}}
		}
		for _, f := range found {
			f.Check = c.name
			if f.Level > OK {
				f.Docs = page + c.name
			}
			if !slices.Contains(all, f) {
				all = append(all, f)
			}
		}
	}
	return all
}

// Worst returns the highest level of findings.
func Worst(all []Finding) (worst Level) {
	for _, f := range all {
		worst = max(worst, f.Level)
	}
	return worst
}

func fault(l Level, remedy, problem string, args ...any) Finding {
	// The text of joined errors has several lines. Errors of clients have URLs.
	text := process.Redact(strings.ReplaceAll(fmt.Sprintf(problem, args...), "\n", "; "))
	return Finding{Level: l, Problem: text, Remedy: remedy}
}

// label names a process: its services and its name.
func label(r *process.Report) string {
	name := strings.Join(r.Services, ",")
	if len(r.Services) == len(services) {
		name = "watershed"
	}
	return strings.TrimSpace(name + " " + r.Name())
}

// noReports returns a finding that a check has no reports to read.
func noReports(in *Input) []Finding {
	if len(in.Reports) == 0 {
		return []Finding{fault(Skipped, "", "no process has sent a report")}
	}
	return nil
}

// responding returns the reports without an error.
func responding(all []*process.Report) []*process.Report {
	return slices.DeleteFunc(slices.Clone(all), func(r *process.Report) bool { return r.Error != "" })
}

// ofTLS reports if an error is about certificates. The check of CAs then has the finding.
func ofTLS(text string) bool {
	return strings.Contains(text, "x509:") || strings.Contains(text, "tls:") || strings.Contains(text, "certificate")
}
