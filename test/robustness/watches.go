package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"watershed.dev/test/robustness/history"
)

// target is the selection of a watch.
type target struct {
	key, shard string
	// path and query are the path and the query of the request, without a revision.
	path  string
	query url.Values
}

// targetOf returns the target of watch n: every object, a shard, an object, or the objects of all namespaces.
func (x *resource) targetOf(n int) target {
	t := target{path: x.path, query: url.Values{}}
	switch {
	case x.stay || n%8 == 7:
		t.key = ours + fmt.Sprint(n%x.objects)
		if t.path = x.watchPath(t.key); n%2 == 0 {
			t.path = x.path
			t.query.Set("fieldSelector", "metadata.name="+t.key)
		}
	case n%8 == 6:
		t.path = x.everywhere
	case n%3 > 0:
		t.shard = shards[n%len(shards)]
		t.query.Set("labelSelector", "shard="+t.shard)
	}
	return t
}

// watch keeps a watch open over any number of connections, until it receives the final revision.
//
//	list, or initial events → segment at a revision → (ended or stalled) next segment from position
//	                                                → (410) list again
//	                                                → (position = final) done
func (w *workload) watch(x *resource, n int) {
	client := w.client()
	t := x.targetOf(n)
	position := &x.positions[n]
	var deadline time.Time
	done := func() bool {
		final := x.final.Load()
		return final > 0 && position.Load() >= final
	}
	for !done() {
		if x.final.Load() > 0 && deadline.IsZero() {
			deadline = time.Now().Add(3 * time.Minute)
		}
		if !deadline.IsZero() && time.Now().After(deadline) {
			w.complain("watch %d of %s %q came to %d, not to the end at %d", n, x.name, t.key+t.shard, position.Load(),
				x.final.Load())
			return
		}
		start := position.Load()
		s := &history.Segment{Key: t.key, Shard: t.shard, Start: start, Initial: start == 0, Begin: x.history.Now()}
		if start == 0 && n%2 == 0 && t.key == "" { // half of the watches list first, the others request initial events
			h := history.Read{Shard: t.shard, Begin: s.Begin}
			q := url.Values{}
			if t.shard != "" {
				q.Set("labelSelector", "shard="+t.shard)
			}
			w.relists.Add(1)
			if !w.list(client, x, q, &h) {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			x.history.Saw(h)
			position.Store(h.Revision)
			s.Start, s.Initial = h.Revision, false
		} else if start > 0 {
			w.resumes.Add(1)
		}
		err := w.connection(context.Background(), client, x, t, s, func(revision int64) bool {
			position.Store(revision)
			w.received(revision)
			return done()
		})
		x.history.Watched(s)
		if errors.Is(err, errExpired) {
			log.Printf("a watch of %s from %d that had come to %d: %v", x.name, s.Start, position.Load(), err)
			w.expired.Add(1)
			position.Store(0)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// watchLate resumes watches from revisions that clients have received, the newest or older, or requests initial events.
// Each watch ends at the newest known revision. Most watches share no stream with others, because their selector is
// unique.
func (w *workload) watchLate(ctx context.Context, x *resource, r *rand.Rand) {
	client := w.client()
	for n := 0; ctx.Err() == nil; n++ {
		t := target{path: x.path, query: url.Values{}}
		switch r.IntN(8) {
		case 0:
			t.key = x.key(r)
			t.query.Set("fieldSelector", "metadata.name="+t.key)
		case 1:
			t.key = x.key(r)
			t.path = x.watchPath(t.key)
		case 2:
			t.shard = shards[r.IntN(len(shards))]
			t.query.Set(x.selector(t.shard, r))
		case 3:
			t.path = x.everywhere
		default:
			t.query.Set("labelSelector", fmt.Sprintf("unique!=%d", r.Int64()))
		}
		goal := x.known.newest()
		s := &history.Segment{Key: t.key, Shard: t.shard, Start: x.known.draw(r), Begin: x.history.Now()}
		if s.Initial = s.Start == 0 || r.IntN(4) == 0; s.Initial {
			s.Start = 0
		}
		lateCtx, cancel := context.WithTimeout(ctx, lateTimeout)
		err := w.connection(lateCtx, client, x, t, s, func(revision int64) bool {
			x.known.add(revision)
			w.received(revision)
			return revision >= goal
		})
		cancel()
		x.history.Watched(s)
		w.late.Add(1)
		if errors.Is(err, errExpired) {
			w.lateExpired.Add(1)
		}
		time.Sleep(time.Duration(r.IntN(100)) * time.Millisecond)
	}
}

// lateTimeout bounds a watch of watchLate. A bookmark of a server that is behind needs some seconds.
const lateTimeout = 6 * time.Second

var errExpired = errors.New("410")

// connection watches over a single connection. It calls reached with the revision of each event after the initial
// events, and ends when reached returns true.
func (w *workload) connection(ctx context.Context, client *http.Client, x *resource, t target, s *history.Segment,
	reached func(revision int64) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stall := time.AfterFunc(30*time.Second,
		cancel) // no bookmark for 30 s: a real client would detect a dead connection
	defer stall.Stop()
	q := url.Values{"watch": {"true"}, "allowWatchBookmarks": {"true"}}
	for parameter, values := range t.query {
		q[parameter] = values
	}
	if s.Initial {
		q.Set("sendInitialEvents", "true")
		q.Set("resourceVersionMatch", "NotOlderThan")
	} else {
		q.Set("resourceVersion", fmt.Sprint(s.Start))
	}
	req, err := http.NewRequestWithContext(ctx, "GET", w.url+t.path+"?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusGone {
		return errExpired
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	initial := s.Initial
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return err
		}
		stall.Reset(30 * time.Second)
		var e struct {
			Type   string
			Object struct {
				object
				Code    int
				Message string
			}
		}
		if err := json.Unmarshal(bytes.TrimSpace(line), &e); err != nil {
			w.complain("a frame is not JSON: %.200q", line)
			return err
		}
		switch {
		case e.Type == "ERROR" && e.Object.Code == http.StatusGone:
			return fmt.Errorf("%w: %s", errExpired, e.Object.Message)
		case e.Type == "ERROR":
			return fmt.Errorf("error event: %s", line)
		case e.Type != "BOOKMARK" && !e.Object.isOurs():
			continue
		}
		f := history.Frame{Type: e.Type, Item: e.Object.item(), At: x.history.Now()}
		f.InitialEnd = e.Object.Metadata.Annotations["k8s.io/initial-events-end"] == "true"
		s.Frames = append(s.Frames, f)
		w.events.Add(1)
		if f.InitialEnd {
			initial = false
		}
		if !initial && reached(f.Item.Revision) {
			return nil
		}
	}
}
