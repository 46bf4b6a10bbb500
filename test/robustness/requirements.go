package main

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/test/harness"
	"watershed.dev/test/robustness/history"
)

// Some faults must not delay clients. Each is without another fault, and begins when the cluster has recovered from the
// faults before. The bounds are several times the times of Watershed on a busy machine, and longer than a virtual
// machine stands still.
const (
	// anyRevisionTimeout bounds a list and the initial events of any revision while etcd is stopped.
	anyRevisionTimeout = time.Minute
	// strandedTimeout bounds the time until each watch has received an event that a stranded replica lacks. The replica
	// reports after 4 to 8 s that it is behind, and idle watches then wait for a bookmark.
	strandedTimeout = 45 * time.Second
)

// settleTimeout bounds the time until the cluster has recovered from the faults before.
const settleTimeout = 2 * time.Minute

// settled waits until requests of client, of each kind, succeed several times in a row, and each watch is current. If
// that takes longer than settleTimeout, it returns false, and its complaint names the last condition that was not met.
func (w *workload) settled(client *http.Client, x *resource) bool {
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	var unmet error
	for n := 0; n < 5; n++ {
		if err := w.recovered(ctx, client, x); err != nil {
			unmet, n = err, -1
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			w.complain("the cluster has not recovered after %s: %v", settleTimeout, unmet)
			return false
		}
	}
	return true
}

// recovered returns the first condition of a cluster without faults that is not met.
func (w *workload) recovered(ctx context.Context, client *http.Client, x *resource) error {
	code, body, err := w.do(ctx, client, "GET", "/readyz?verbose", "", "")
	if err != nil {
		return fmt.Errorf("/readyz: %w", err)
	}
	if code != http.StatusOK {
		return fmt.Errorf("/readyz answers %d: %s", code, body)
	}
	for _, revision := range []string{"", "0"} {
		if !w.list(client, x, url.Values{"resourceVersion": {revision}}, &history.Read{}) {
			return fmt.Errorf("a list with resourceVersion=%q fails", revision)
		}
	}
	if err := w.anyInitialEvents(ctx, client, x); err != nil {
		return fmt.Errorf("initial events of any revision: %w", err)
	}
	return w.current(ctx, x)
}

// anyInitialEvents requests the initial events of any revision, and waits until they end.
func (w *workload) anyInitialEvents(ctx context.Context, client *http.Client, x *resource) error {
	t := target{path: x.path, query: url.Values{"resourceVersion": {"0"}}}
	s := &history.Segment{Initial: true}
	return w.connection(ctx, client, x, t, s, func(int64) bool { return true })
}

// current waits until every watch of a resource has received the newest known revision.
func (w *workload) current(ctx context.Context, x *resource) error {
	newest := x.known.newest()
	for n := range x.positions {
		for x.positions[n].Load() < newest {
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
				return fmt.Errorf("watch %d of %s has received revision %d, and %d is known",
					n, x.path, x.positions[n].Load(), newest)
			}
		}
	}
	return nil
}

// stopEtcd stops all members of etcd, and requires a list and initial events of any revision.
func (c *cluster) stopEtcd() {
	w := c.workload
	x, client := w.resources[0], w.client()
	if !w.settled(client, x) { // over the same connection: another host may have loaded nothing yet
		return
	}
	members := c.named("etcd-")
	signalAll(members, syscall.SIGSTOP)
	defer signalAll(members, syscall.SIGCONT)
	ctx, cancel := context.WithTimeout(context.Background(), anyRevisionTimeout)
	defer cancel()
	list := func() error {
		code, _, err := w.do(ctx, client, "GET", x.path+"?resourceVersion=0", "", "")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("the code is %d", code)
		}
		return err
	}
	for name, read := range map[string]func() error{
		"a list":         list,
		"initial events": func() error { return w.anyInitialEvents(ctx, client, x) },
	} {
		err := read()
		for ; err != nil && ctx.Err() == nil; err = read() {
			time.Sleep(200 * time.Millisecond)
		}
		if err != nil {
			w.complain("etcd is stopped, and %s with resourceVersion=0 fails for %s: %v", name, anyRevisionTimeout, err)
		}
	}
}

// strand makes a replica's connections to NATS hang, and requires that each watch receives the next events.
func (c *cluster) strand(p *process) {
	w := c.workload
	x := w.resources[0]
	if !w.settled(w.client(), x) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), strandedTimeout)
	defer cancel()
	toLog := func(l *link) bool { return l.from == p.name && strings.HasPrefix(l.to, "nats-") }
	c.hang(toLog, func() {
		time.Sleep(time.Second) // until the newest known revision is after the last that the replica has
		began := time.Now()
		if err := w.current(ctx, x); err != nil {
			w.complain("%s receives no events, and watches wait for them for over %s: %v", p.name, strandedTimeout, err)
			return
		}
		log.Printf("%s is stranded, and every watch is current after %s", p.name,
			time.Since(began).Round(time.Millisecond))
	})
}

// loseMessage deletes the last message of the log when no publisher can add another, or another of the last 200. The
// publisher is then killed.
func (c *cluster) loseMessage(f fault) {
	if !c.workload.settled(c.workload.client(), c.workload.resources[0]) {
		return
	}
	if err := c.tryLoseMessage(rand.New(rand.NewPCG(uint64(f.target), 3))); err != nil {
		log.Printf("No message is lost: %v", err)
	}
}

func (c *cluster) tryLoseMessage(r *rand.Rand) error {
	js, err := harness.RegistryJetStream(c.dir)
	if err != nil {
		return err
	}
	defer js.Conn().Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	publishers := c.named("registry-")
	last := r.IntN(2) == 0
	if last {
		signalAll(publishers, syscall.SIGSTOP)
		defer func() {
			for _, p := range publishers {
				p.kill(0)
			}
		}()
		time.Sleep(100 * time.Millisecond) // the servers store the last messages of the publisher
	}
	stream, err := js.Stream(ctx, eventlog.StreamName)
	if err != nil {
		return err
	}
	state := stream.CachedInfo().State
	sequence := state.LastSeq
	if !last {
		sequence -= min(1+uint64(r.IntN(200)), state.LastSeq-state.FirstSeq)
	}
	if err := stream.DeleteMsg(ctx, sequence); err != nil {
		return fmt.Errorf("message %d of %d: %w", sequence, state.LastSeq, err)
	}
	return nil
}
