package publisher

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// requestTimeout bounds a term's requests to etcd and NATS between two waits for events. It also bounds the read of the
// log's end while no lease can be granted.
const requestTimeout = 10 * time.Second

// errLogDeleted ends a term that has deleted the log. The next term fills another.
var errLogDeleted = errors.New("the event log is deleted, and is filled again")

// term performs the requests of a core.Term. A single goroutine uses it.
type term struct {
	*core.Term
	*Publisher
	log *eventlog.Writer
}

// proceed adds the term's entries to the log and performs its requests, until the term waits for etcd's events. It
// returns the error that ends the term.
func (t *term) proceed(ctx context.Context) error {
	if err := t.add(ctx); err != nil {
		return err
	}
	if t.Request.Op == core.WatchEtcd {
		return t.log.FlushLater(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := t.log.Flush(ctx); err != nil {
		return err
	}
	for t.Request.Op != core.WatchEtcd {
		if err := t.perform(ctx, t.Request); err != nil {
			return err
		}
		if err := t.add(ctx); err != nil { // progress and resets, which do not wait
			return err
		}
	}
	return nil
}

// add adds the term's entries to the log.
func (t *term) add(ctx context.Context) error {
	entries := t.TakeEntries()
	for _, entry := range entries {
		switch e := entry.Event; {
		case core.IsChange(e):
			publishedEvents.WithLabelValues(e.StorageResource).Inc()
		case e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "":
			resetCount.Inc()
			slog.Warn("The event log "+t.Decision, "reason", t.Reason, "after", e.Revision, "last", entry.Expected.String())
		}
	}
	t.published.Store(t.core.Published)
	return t.log.Add(ctx, entries...)
}

// perform performs a request and answers it.
func (t *term) perform(ctx context.Context, r core.Request) (err error) {
	var revision int64
	switch r.Op {
	case core.ReadLog:
		var end core.LogEnd
		end, err = t.Publisher.Log.End(ctx, t.JS, t.keyOf)
		if errors.Is(err, eventlog.ErrOtherStorage) {
			return t.moveLog(ctx)
		}
		if err == nil {
			t.LogRead(end)
		}
		return err
	case core.ReadEtcd:
		var etcd core.EtcdState
		if etcd, err = t.readEtcd(ctx, r.Event); err == nil {
			t.EtcdRead(etcd)
		}
		return err
	case core.ReadObservedEnds:
		var etcd core.EtcdState
		if etcd, err = t.readEpoch(ctx); err != nil {
			return err
		}
		var ends []core.LogEnd
		if ends, err = t.observedEnds(ctx, etcd.Epoch); err == nil {
			t.ObservedEndsRead(etcd.Epoch, ends)
		}
		return err
	case core.DeleteLog:
		return t.deleteLog(ctx, r.Last)
	case core.AwaitAck:
		select {
		case ack := <-t.log.Acks():
			return t.acknowledge(ack)
		case <-ctx.Done():
			return ctx.Err()
		}
	case core.End:
		return r.Reason
	case core.WriteEpoch:
		revision, err = t.writeEpoch(ctx, r.Epoch, r.After)
		if errors.Is(err, rpctypes.ErrNoSpace) && t.Unwritten() {
			slog.Warn("etcd has no space for the next fencing token; the log continues with the token in etcd")
			return nil
		}
	default:
		revision, err = t.readRevision(ctx, r)
	}
	if err == nil {
		t.Answer(revision)
	}
	return err
}

// deleteLog deletes the stream, which has lost its end, if its last message is still the same. It returns the error
// that ends the term.
func (t *term) deleteLog(ctx context.Context, last core.ID) error {
	log := t.Publisher.Log
	if id, _, _, err := log.ID.Last(ctx, t.JS); err != nil {
		return err
	} else if id != last {
		return core.ErrEpochChanged
	}
	switch deleted, err := log.Delete(ctx, t.JS); {
	case deleted:
		slog.Error("The stream of the event log is deleted: it has lost its end", "stream", log.ID.Stream())
		return errLogDeleted
	case errors.Is(err, eventlog.ErrNotDeleted):
		slog.Warn("The stream of the event log has lost its end, and cannot be deleted", "stream", log.ID.Stream(),
			"error", err)
		t.LogStays()
		return nil
	case err != nil:
		return err
	}
	return errNoLeader
}

// moveLog deletes the stream, because its storage is not --log-storage, if this publisher is still elected. It returns
// the error that ends the term.
func (t *term) moveLog(ctx context.Context) error {
	holder, err := t.Etcd.Client.Client.Get(ctx, t.electionKey())
	if err != nil {
		return err
	}
	// No candidate holds the key while the publisher leads without a lease.
	if len(holder.Kvs) > 0 && string(holder.Kvs[0].Value) != t.Identity {
		return core.ErrEpochChanged
	}
	log := t.Publisher.Log
	deleted, err := log.Delete(ctx, t.JS)
	if err != nil {
		return err
	}
	if !deleted {
		return errNoLeader
	}
	slog.Warn("The stream of the event log is deleted: its storage has changed", "stream", log.ID.Stream(), "storage",
		log.Storage)
	return errLogDeleted
}

// errNoLeader means that the NATS servers cannot delete the stream now.
var errNoLeader = errors.New("no leader of the NATS servers responds")

// acknowledge records that JetStream has stored messages, and returns the error of a message that it has not.
func (t *term) acknowledge(ack eventlog.Ack) error {
	if ack.ID != (core.ID{}) {
		t.Acknowledged(ack.ID)
		t.failure.Store(nil)
		if t.Publisher.Log.ID == eventlog.Main {
			publishedRevision.Set(float64(t.core.Published))
		}
	}
	return ack.Err
}

// idleProgress is the interval of progress messages while etcd has no events. It is far below the log's retention, so
// the last message of the log always holds a revision to resume from.
const idleProgress = 30 * time.Second

// watch publishes etcd's events and progress, and rotates the fencing token of the epoch. A receive from
// progressRequests means that a reader requested progress.
func (t *term) watch(ctx context.Context, watch *etcdWatch, progressRequests <-chan struct{}) (err error) {
	idle := time.NewTicker(idleProgress)
	defer idle.Stop()
	rotations := time.NewTicker(tokenPeriod)
	defer rotations.Stop()
	checks := time.NewTicker(tokenCheckPeriod)
	defer checks.Stop()
	for err == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case ack := <-t.log.Acks():
			err = t.acknowledge(ack)
		case <-t.log.Due():
			err = t.log.Flush(ctx)
		case <-progressRequests:
			err = t.requestProgress(ctx, watch)
		case <-checks.C:
			err = t.checkToken(ctx)
		case <-rotations.C:
			t.Rotate(rand.Text())
		case <-idle.C:
			t.ForceProgress()
			err = t.requestProgress(ctx, watch)
		case resp, ok := <-watch.responses:
			err = t.handle(ctx, resp, ok)
			watch.room.Release(resp.size)
		}
		if err == nil {
			err = t.proceed(ctx)
		}
	}
	return err
}

// requestProgress requests a progress notification on the watch. The open batch does not wait for etcd.
func (t *term) requestProgress(ctx context.Context, watch *etcdWatch) error {
	if err := t.log.Flush(ctx); err != nil {
		return err
	}
	return watch.requestProgress()
}
