// Package etcdstatus reads the state of an etcd for operators: its members, their sizes and alarms, and whether it has
// a quorum. It writes nothing, and starts no goroutine that lasts.
package etcdstatus

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/process"
	processv1 "watershed.dev/proto/watershed/process/v1"
)

// Status is the state of an etcd.
type Status struct {
	Servers []string `json:"servers"`
	// Error is the error of a linearizable read, which fails without a quorum.
	Error string `json:"error,omitempty"`
	// Revision and ReadSeconds are of the linearizable read.
	Revision    int64   `json:"revision,omitempty"`
	ReadSeconds float64 `json:"readSeconds"`
	// Voting is the number of voting members, or 0 if no member responds.
	Voting  int      `json:"voting"`
	Members []Member `json:"members"`
	// Alarms are the raised alarms, such as NOSPACE.
	Alarms []string `json:"alarms,omitempty"`
}

// Member is the state of the member at an endpoint of the client.
type Member struct {
	Endpoint string `json:"endpoint"`
	// Error is why the member does not respond. The fields below are then empty.
	Error   string `json:"error,omitempty"`
	Name    string `json:"name,omitempty"`
	Version string `json:"version,omitempty"`
	// Leader reports if the member is the leader, and HasLeader if it has a leader.
	Leader    bool `json:"leader"`
	HasLeader bool `json:"hasLeader"`
	// Bytes is the size of the member's database file, InUseBytes the used part, and QuotaBytes the limit.
	Bytes      int64 `json:"bytes,omitempty"`
	InUseBytes int64 `json:"inUseBytes,omitempty"`
	QuotaBytes int64 `json:"quotaBytes,omitempty"`
	// Errors are the member's own errors, except alarms.
	Errors []string `json:"errors,omitempty"`
}

// Timeout bounds each read.
const Timeout = 2 * time.Second

// Read returns the state of the etcd that client is connected to. key is a key that the client may read.
func Read(ctx context.Context, client *clientv3.Client, key string) *Status {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	s := &Status{Members: make([]Member, len(client.Endpoints()))}
	names := map[uint64]string{}
	ids := make([]uint64, len(s.Members))
	alarms := make([][]string, len(s.Members))
	var wg sync.WaitGroup
	wg.Go(func() {
		began := time.Now()
		resp, err := client.Get(ctx, key, clientv3.WithCountOnly())
		s.ReadSeconds = time.Since(began).Seconds()
		if err != nil {
			s.Error = err.Error()
			return
		}
		s.Revision = resp.Header.Revision
	})
	wg.Go(func() {
		resp, err := client.MemberList(ctx, clientv3.WithSerializable())
		if err != nil {
			return
		}
		for _, m := range resp.Members {
			names[m.ID] = m.Name
			if !m.IsLearner {
				s.Voting++
			}
		}
	})
	for i, endpoint := range client.Endpoints() {
		s.Servers = append(s.Servers, process.Redact(endpoint))
		wg.Go(func() {
			m := &s.Members[i]
			m.Endpoint = process.Redact(endpoint)
			resp, err := client.Status(ctx, endpoint)
			if err != nil {
				m.Error = err.Error()
				return
			}
			ids[i] = resp.Header.MemberId
			m.Version, m.Leader, m.HasLeader = resp.Version, resp.Leader == resp.Header.MemberId, resp.Leader != 0
			m.Bytes, m.InUseBytes, m.QuotaBytes = resp.DbSize, resp.DbSizeInUse, resp.DbSizeQuota
			for _, e := range resp.Errors { // an alarm is "memberID:10276657743932975437 alarm:NOSPACE "
				if _, alarm, ok := strings.Cut(e, "alarm:"); ok {
					alarms[i] = append(alarms[i], strings.TrimSpace(alarm))
				} else {
					m.Errors = append(m.Errors, e)
				}
			}
		})
	}
	wg.Wait()
	for i := range s.Members {
		s.Members[i].Name = names[ids[i]]
	}
	s.Alarms = slices.Concat(alarms...)
	slices.Sort(s.Alarms)
	s.Alarms = slices.Compact(s.Alarms)
	return s
}

// Program returns the report of the process of the member at an endpoint of the client. A member that is not
// Watershed's has no report: the code of the error is Unimplemented.
func Program(ctx context.Context, client *clientv3.Client, endpoint string) (*process.Report, error) {
	conn, err := client.Dial(endpoint)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	sent := time.Now()
	resp, err := processv1.NewProcessesClient(conn).Report(ctx, &processv1.ReportRequest{})
	if err != nil {
		return nil, err
	}
	r, err := process.DecodeProgram("etcd", resp.Report, sent, time.Now())
	if err == nil {
		r.Address = process.Redact(endpoint)
	}
	return r, err
}
