package registry

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/process"
	"watershed.dev/platform/recovery"
	"watershed.dev/services/registry/etcdstatus"
)

// State is registry's part of its process's report.
type State struct {
	// Etcds are the states of the etcds, the main etcd's first, and Logs the states of their event logs.
	Etcds []etcdstatus.Status `json:"etcds"`
	Logs  []LogState          `json:"logs"`
}

// LogState is the state of an event log.
type LogState struct {
	// Log is the log's id; empty: the main etcd's log.
	Log string `json:"log,omitempty"`
	// Publishing reports if this registry writes the log.
	Publishing bool `json:"publishing"`
	// Failure is why this registry cannot publish, although it is elected. JetStream may reject messages while NATS
	// responds, for example because its disk is full.
	Failure string `json:"failure,omitempty"`
	// Revision is the revision up to which this registry has read the log.
	Revision int64 `json:"revision"`
	// Wanted is --log-replicas.
	Wanted int `json:"wanted,omitempty"`
	// Error is why NATS does not respond. The fields below are then empty.
	Error string `json:"error,omitempty"`
	// Leader is the NATS server that leads the stream; empty: the server is alone. Replicas is the number of servers
	// that have the stream, and Current the number of current replicas.
	Leader   string `json:"leader,omitempty"`
	Replicas int    `json:"replicas,omitempty"`
	Current  int    `json:"current,omitempty"`
	// Sequence is the last sequence of the stream, and Messages and Bytes its size.
	Sequence uint64 `json:"sequence,omitempty"`
	Messages uint64 `json:"messages,omitempty"`
	Bytes    uint64 `json:"bytes,omitempty"`
	MaxBytes int64  `json:"maxBytes,omitempty"`
	// RetentionSeconds is --log-retention, and OldestSeconds the age of the oldest message.
	RetentionSeconds float64 `json:"retentionSeconds,omitempty"`
	OldestSeconds    float64 `json:"oldestSeconds,omitempty"`
}

// state returns the state of the etcds and of the event logs.
func (s *Service) state(ctx context.Context) *State {
	etcds := s.resources.Storage.Etcds()
	state := &State{Etcds: make([]etcdstatus.Status, len(etcds)), Logs: make([]LogState, len(etcds))}
	var wg sync.WaitGroup
	for i, etcd := range etcds {
		wg.Go(func() {
			defer recovery.ToError("reading the state of etcd", new(error))
			state.Etcds[i] = *etcdstatus.Read(ctx, etcd.Client.Client, etcd.OwnKey("nothing"))
		})
		wg.Go(func() {
			defer recovery.ToError("reading the state of the event log", new(error))
			state.Logs[i] = s.logs[i].state(ctx)
		})
	}
	wg.Wait()
	return state
}

func (l *etcdLog) state(ctx context.Context) LogState {
	ctx, cancel := context.WithTimeout(ctx, etcdstatus.Timeout)
	defer cancel()
	st := LogState{Log: string(l.etcd.Log), Publishing: l.publisher.Elected(), Revision: l.watchCache.Progress(),
		Wanted: max(l.options.Replicas, 1)}
	if err := l.publisher.Failure(); err != nil {
		st.Failure = process.Redact(err.Error())
	}
	info, err := l.info(ctx)
	if err != nil {
		st.Error = process.Redact(err.Error())
		return st
	}
	st.Replicas, st.Current = 1, eventlog.CurrentReplicas(info)
	if c := info.Cluster; c != nil {
		st.Leader, st.Replicas = c.Leader, len(c.Replicas)+1
	}
	st.Sequence, st.Messages, st.Bytes = info.State.LastSeq, info.State.Msgs, info.State.Bytes
	st.MaxBytes, st.RetentionSeconds = l.options.MaxBytes, l.options.Retention.Seconds()
	if info.State.Msgs > 0 {
		st.OldestSeconds = time.Since(info.State.FirstTime).Seconds()
	}
	return st
}

// info returns the state of the log's stream.
func (l *etcdLog) info(ctx context.Context) (*jetstream.StreamInfo, error) {
	if !l.service.nats.IsConnected() {
		return nil, errors.Join(errors.New("not connected to NATS"), l.service.nats.LastError())
	}
	stream, err := l.service.js.Stream(ctx, l.etcd.Log.Stream())
	if err != nil {
		return nil, err
	}
	return stream.CachedInfo(), nil
}
