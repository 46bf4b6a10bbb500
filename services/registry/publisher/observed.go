package publisher

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// minObservedEndsWait and maxObservedEndsWait are how long a publisher waits for the observed ends of the
	// registries. The servers of NATS may have restarted, and registries may still reconnect. It waits longer than the
	// minimum if no registry has read etcd's fencing token. The last request may take longer.
	minObservedEndsWait = 500 * time.Millisecond
	maxObservedEndsWait = 2 * time.Second
	// observedEndsPause is the pause between two requests.
	observedEndsPause = 100 * time.Millisecond
)

// KeepEnd keeps the end of the log that this registry has read in a file of dir, for its next start. It is called
// before Observe. Until ReplaceEnd, the file has the end of the process before. It returns an error if the file cannot
// be created, locked, written or mapped.
func (p *Publisher) KeepEnd(dir string) error {
	name := "log-end"
	if p.Log.ID != eventlog.Main {
		name += "." + string(p.Log.ID)
	}
	return p.observed.Keep(filepath.Join(dir, name))
}

// ReplaceEnd replaces the end of the process before, because this registry has read the log of etcd's epoch to its end.
func (p *Publisher) ReplaceEnd() { p.observed.Replace() }

// Observe records that this registry has read an event of the log. Events are recorded in the log's order.
func (p *Publisher) Observe(e *logv1.Event) {
	key := ""
	if core.IsChange(e) {
		key = p.keyOf(e)
	}
	p.observed.Observe(e, key)
}

// InEpoch returns the epoch of the log that this registry has read. It returns an error unless that log is read up to a
// revision, and etcd is in its epoch. A log that was kept beside another etcd is in an earlier epoch, until a publisher
// begins the next.
func (p *Publisher) InEpoch(ctx context.Context, read int64) (epoch string, err error) {
	end := p.observed.End()
	if end.Empty || end.Last.Revision < read {
		return "", fmt.Errorf("the log is read up to revision %d, of %d", end.Last.Revision, read)
	}
	etcd, err := p.readEpoch(ctx)
	if err == nil {
		err = p.readEvent(ctx, &etcd, end.Event)
	}
	if err != nil {
		return "", err
	}
	if reason := core.ContinuesEpoch(&end, etcd); reason != "" {
		return "", errors.New(reason)
	}
	return end.Progress.Epoch, nil
}

// observedEnds returns the ends of the log that the registries have read or kept. Without an epoch in etcd it returns
// only this registry's end, so that a first start does not wait.
func (p *Publisher) observedEnds(ctx context.Context, record core.Epoch) ([]core.LogEnd, error) {
	if record.ID == "" {
		return []core.LogEnd{p.observed.End()}, nil
	}
	ends := p.observed.Ends()
	for began := time.Now(); ; lifecycle.Sleep(ctx, observedEndsPause) {
		round, err := p.Log.ID.ObservedEnds(ctx, p.NATS)
		if err != nil {
			return nil, err
		}
		ends = append(ends, round...)
		hasToken := func(e core.LogEnd) bool { return !e.Empty && e.HasToken(record.Token) }
		waited := time.Since(began)
		if waited > maxObservedEndsWait || waited > minObservedEndsWait && slices.ContainsFunc(ends, hasToken) {
			return ends, nil
		}
	}
}
