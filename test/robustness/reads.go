package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"watershed.dev/test/robustness/history"
)

// read lists objects: consistently, at any revision, not older than or exactly at a revision, with a selector, or in
// pages.
func (w *workload) read(ctx context.Context, x *resource, r *rand.Rand) {
	client := w.client()
	for ctx.Err() == nil {
		h := history.Read{}
		q := url.Values{}
		if r.IntN(3) == 0 {
			h.Shard = shards[r.IntN(len(shards))]
			q.Set(x.selector(h.Shard, r))
		}
		switch r.IntN(7) {
		case 0:
			h.Any = true
			q.Set("resourceVersion", "0")
		case 1, 2:
			q.Set("limit", fmt.Sprint(2+r.IntN(4)))
		case 3:
			if h.NotOlderThan = x.known.newest(); h.NotOlderThan > 0 {
				q.Set("resourceVersion", fmt.Sprint(h.NotOlderThan))
			}
		case 4:
			if h.Exact = x.known.draw(r); h.Exact > 0 {
				q.Set("resourceVersion", fmt.Sprint(h.Exact))
				q.Set("resourceVersionMatch", "Exact")
			}
		}
		h.Begin = x.history.Now()
		if w.list(client, x, q, &h) {
			w.reads.Add(1)
			x.known.add(h.Revision)
			x.history.Saw(h)
		}
		time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
	}
}

// pageDelay is how long a client works on a page.
const pageDelay = 100 * time.Millisecond

// list reads all pages of a list. It returns false if a page expired or failed, because the list then proves nothing.
func (w *workload) list(client *http.Client, x *resource, q url.Values, h *history.Read) bool {
	first := true
	for {
		code, answer, err := w.do(context.Background(), client, "GET", x.path+"?"+q.Encode(), "", "")
		var l struct {
			object
			Items []object
		}
		if err != nil || code != 200 || json.Unmarshal(answer, &l) != nil {
			return false
		}
		if first { // the first page determines the list's revision
			h.End = x.history.Now()
			h.Revision = l.revision()
			first = false
		} else if l.revision() != h.Revision {
			w.complain("a page is of revision %d, the first one of %d", l.revision(), h.Revision)
		}
		for _, o := range l.Items {
			if o.isOurs() {
				h.Items = append(h.Items, o.item())
			}
		}
		if l.Metadata.Continue == "" {
			return true
		}
		q.Set("continue", l.Metadata.Continue)
		time.Sleep(pageDelay) // objects change between the pages
	}
}

// get reads an object. code is 200, 404 or another code, which proves nothing.
func (w *workload) get(client *http.Client, x *resource, key string) (i history.Item, code int) {
	begin := x.history.Now()
	code, answer, err := w.do(context.Background(), client, "GET", x.path+"/"+key, "", "")
	read := history.Read{Key: key, Begin: begin, End: x.history.Now()}
	switch {
	case err == nil && code == http.StatusOK:
		var o object
		_ = json.Unmarshal(answer, &o)
		i = o.item()
		read.Items = []history.Item{i}
	case err == nil && code == http.StatusNotFound:
	default:
		return i, 0
	}
	w.reads.Add(1)
	x.history.Saw(read)
	return i, code
}
