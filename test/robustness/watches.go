package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/url"
	"time"

	"watershed.dev/test/robustness/history"
)

// watch keeps a watch open over any number of connections, until it receives the final revision.
//
//	list, or initial events → segment at a revision → (ended or stalled) next segment from position
//	                                                → (410) list again
//	                                                → (position = final) done
func (w *workload) watch(n int) {
	client := w.client()
	shard := ""
	if n%3 > 0 {
		shard = shards[n%len(shards)]
	}
	var position int64
	var deadline time.Time
	for {
		final := w.final.Load()
		if final > 0 && position >= final {
			return
		}
		if final > 0 && deadline.IsZero() {
			deadline = time.Now().Add(3 * time.Minute)
		}
		if final > 0 && time.Now().After(deadline) {
			w.complain("watch %d of %q came to %d, not to the end at %d", n, shard, position, final)
			return
		}
		s := &history.Segment{Shard: shard, Start: position, Initial: position == 0, Begin: w.history.Now()}
		if position == 0 && n%2 == 0 { // half of the watches list first, the others request initial events
			h := history.Read{Shard: shard, Begin: s.Begin}
			q := url.Values{}
			if shard != "" {
				q.Set("labelSelector", "shard="+shard)
			}
			w.relists.Add(1)
			if !w.list(client, q, &h) {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			w.history.Saw(h)
			position, s.Start, s.Initial = h.Revision, h.Revision, false
		} else if position > 0 {
			w.resumes.Add(1)
		}
		err := w.connection(client, s, &position)
		w.history.Watched(s)
		if errors.Is(err, errExpired) {
			w.expired.Add(1)
			position = 0
		}
		time.Sleep(20 * time.Millisecond)
	}
}

var errExpired = errors.New("410")

func (w *workload) connection(client *http.Client, s *history.Segment, position *int64) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stall := time.AfterFunc(30*time.Second,
		cancel) // no bookmark for 30 s: a real client would detect a dead connection
	defer stall.Stop()
	q := url.Values{"watch": {"true"}, "allowWatchBookmarks": {"true"}}
	if s.Shard != "" {
		q.Set("labelSelector", "shard="+s.Shard)
	}
	if s.Initial {
		q.Set("sendInitialEvents", "true")
		q.Set("resourceVersionMatch", "NotOlderThan")
	} else {
		q.Set("resourceVersion", fmt.Sprint(s.Start))
	}
	req, err := http.NewRequestWithContext(ctx, "GET", w.url+path+"?"+q.Encode(), nil)
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
		if e.Type == "ERROR" {
			if e.Object.Code == http.StatusGone {
				log.Printf("a watch from %d that had come to %d: %s", s.Start, *position, e.Object.Message)
				return errExpired
			}
			return fmt.Errorf("error event: %s", line)
		}
		f := history.Frame{Type: e.Type, Item: e.Object.item(), At: w.history.Now()}
		f.InitialEnd = e.Object.Metadata.Annotations["k8s.io/initial-events-end"] == "true"
		s.Frames = append(s.Frames, f)
		if f.InitialEnd {
			initial = false
		}
		if !initial {
			*position = f.Item.Revision
			w.received(*position)
		}
		w.events.Add(1)
		if final := w.final.Load(); final > 0 && *position >= final {
			return nil
		}
	}
}
