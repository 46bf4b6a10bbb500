package simulation

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// publisher performs the requests of core.Term with etcd and the real Writer, as the publisher of
// registry does with etcd. It takes part in no election: etcd.leader is set by the simulation.
type publisher struct {
	identity string
	log      *eventlog.Options
	nc       *nats.Conn
	js       jetstream.JetStream
	etcd     *etcd
	core     core.Publisher
	terms    int
	read     eventlog.ObservedEnd
}

// run publishes term after term while the publisher is the leader, until ctx is done.
func (p *publisher) run(ctx context.Context) {
	var reader sync.WaitGroup
	defer reader.Wait()
	reader.Go(func() {
		_ = eventlog.Main.Read(ctx, p.nc, eventlog.DirectGetReader{JS: p.js}, func(e *logv1.Event) error {
			p.read.Observe(e, keyOf(e))
			return nil
		})
	})
	sub, err := eventlog.Main.ServeObservedEnds(p.nc, p.read.Ends)
	if err != nil {
		return
	}
	defer func() { _ = sub.Unsubscribe() }()
	elected := false
	for ctx.Err() == nil {
		p.etcd.mu.Lock()
		leader := p.etcd.leader == p.identity
		p.etcd.mu.Unlock()
		if leader && !elected {
			p.core.Elected()
		}
		if elected = leader; leader {
			p.term(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// term runs a term, and ends with its error. It notices a lost election after a second.
func (p *publisher) term(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := eventlog.Main.NewWriter(ctx, p.js)
	if err != nil {
		return
	}
	requests := make(chan *nats.Msg, 16)
	sub, err := p.nc.ChanSubscribe(eventlog.ProgressRequestSubject, requests)
	if err != nil {
		return
	}
	defer func() { _ = sub.Unsubscribe() }()
	p.terms++
	nonce := fmt.Sprintf("%s%d-", p.identity, p.terms)
	t := &term{p.core.Begin(nonce, core.Epoch{ID: nonce, Token: nonce}, eventlog.Encode(p.nc.MaxPayload())),
		p, w, requests, time.NewTicker(time.Second), 0}
	defer t.checks.Stop()
	for err == nil {
		if err = w.Add(ctx, t.TakeEntries()...); err == nil {
			err = t.perform(ctx)
		}
	}
	p.core.TermFailed(time.Now())
}

type term struct {
	*core.Term
	*publisher
	w        *eventlog.Writer
	requests chan *nats.Msg
	checks   *time.Ticker
	// next is the next revision to receive from etcd; 0: the watch has not begun.
	next int64
}

// perform performs the term's request.
func (t *term) perform(ctx context.Context) error {
	r := t.Request
	if r.Op == core.WatchEtcd {
		return t.watch(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := t.w.Flush(ctx); err != nil {
		return err
	}
	switch r.Op {
	case core.ReadLog:
		end, err := t.log.End(ctx, t.js, keyOf)
		if err == nil {
			t.LogRead(end)
		}
		return err
	case core.ReadEtcd:
		t.EtcdRead(t.etcd.state(r.Event))
	case core.ReadObservedEnds:
		ends, err := eventlog.Main.ObservedEnds(ctx, t.nc)
		if err == nil {
			t.ObservedEndsRead(t.etcd.state(core.EtcdEvent{}).Epoch, ends)
		}
		return err
	case core.WriteEpoch:
		revision, err := t.etcd.writeEpoch(t.identity, r.Epoch, r.After)
		if err != nil {
			return err
		}
		t.Answer(revision)
	case core.ReadRevision:
		t.Answer(t.etcd.state(core.EtcdEvent{}).Revision)
	case core.ReadOldest:
		t.etcd.mu.Lock()
		oldest := max(t.etcd.compacted, 1)
		t.etcd.mu.Unlock()
		t.Answer(oldest)
	case core.AwaitAck:
		select {
		case ack := <-t.w.Acks():
			return t.acknowledge(ack)
		case <-ctx.Done():
			return ctx.Err()
		}
	default:
		return r.Reason
	}
	return nil
}

func (t *term) acknowledge(ack eventlog.Ack) error {
	if ack.ID != (core.ID{}) {
		t.Acknowledged(ack.ID)
	}
	return ack.Err
}

// watch publishes the next revision of etcd, or waits for it.
func (t *term) watch(ctx context.Context) error {
	if t.next == 0 {
		t.next = t.Request.Revision
	}
	changes, compacted, changed := t.etcd.transaction(t.next)
	switch {
	case compacted:
		t.Compacted()
		return nil
	case changes != nil:
		if t.next++; len(changes) > 0 {
			t.Transaction(changes)
			return nil
		}
	}
	if err := t.w.FlushLater(ctx); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	default:
	}
	if changed == nil {
		return nil
	}
	select {
	case <-changed:
	case <-ctx.Done():
		return ctx.Err()
	case ack := <-t.w.Acks():
		return t.acknowledge(ack)
	case <-t.w.Due():
		return t.w.Flush(ctx)
	case <-t.requests:
		t.Progress(t.next - 1)
	case <-t.checks.C:
		s := t.etcd.state(core.EtcdEvent{})
		t.Check(s.Epoch, s.Revision)
		t.PublishSums()
		t.Rotate(fmt.Sprintf("%s%d", t.identity, time.Now().UnixNano()))
	}
	return nil
}

// keyOf returns the key of an event's object in the simulated etcd.
func keyOf(e *logv1.Event) string { return e.StorageResource + "/" + e.Name }
