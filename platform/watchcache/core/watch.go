package core

import (
	"slices"
	"strconv"
	"time"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Watch is a client's place in its watch, across streams, replicas and broadcasts. It resumes after the position of the
// last event sent. It updates ResumeAfter, InitialEventsDone and ColumnsSent of its request.
type Watch struct {
	request *watchfanoutv1.WatchRequest
	// Positioned: the client has every event up to ResumeAfter, so the watch may join a broadcast.
	Positioned bool
	// Reached: the watch tier has reached ResumeAfter, so a broadcast may start there.
	Reached bool
	// begun: a frame of the watch's own stream was sent.
	begun bool
	// NextBookmark is when the next bookmark is due.
	NextBookmark time.Time
}

// NewWatch returns the watch of a request. nextBookmark is when the first bookmark is due. A watch from a known
// revision has no initial events, so it may join a broadcast at once.
func NewWatch(r *watchfanoutv1.WatchRequest, nextBookmark time.Time) Watch {
	w := Watch{request: r, NextBookmark: nextBookmark}
	revision, err := strconv.ParseInt(r.ResourceVersion, 10, 64)
	if err == nil && revision > 0 && (r.SendInitialEvents == nil || !*r.SendInitialEvents) {
		w.setPosition(events.Position{Revision: revision, Index: events.LastIndex})
	}
	return w
}

func (w *Watch) setPosition(p events.Position) {
	w.Positioned = true
	w.request.ResumeAfter, w.request.InitialEventsDone = p.Proto(), true
}

// Position returns the position of the last event sent.
func (w *Watch) Position() events.Position { return events.FromProto(w.request.ResumeAfter) }

// WantsInitialEvents reports whether the watch starts with all objects.
func (w *Watch) WantsInitialEvents() bool {
	if w.request.SendInitialEvents != nil {
		return *w.request.SendInitialEvents
	}
	return w.request.ResourceVersion == "" || w.request.ResourceVersion == "0"
}

// Resumable reports whether another stream can continue the watch: its initial events were not sent in part only.
func (w *Watch) Resumable() bool { return w.request.ResumeAfter != nil || !w.begun }

// MayJoin reports whether the watch may join a broadcast. The first row of a Table carries the column definitions, so
// it must come on the client's own stream.
func (w *Watch) MayJoin() bool {
	asTable := w.request.GetQuery().GetOutput().GetAs().GetKind() == "Table"
	return w.Positioned && (!asTable || w.request.ColumnsSent)
}

// Sent records that a frame of the watch's own stream was sent.
func (w *Watch) Sent(m *watchfanoutv1.WatchFrame) {
	w.begun = true
	w.request.ColumnsSent = w.request.ColumnsSent || m.ColumnsSent
	if m.Position.GetRevision() == 0 {
		return
	}
	w.request.ResumeAfter, w.Reached = m.Position, true
	if m.InitialEventsDone || w.request.InitialEventsDone || !w.WantsInitialEvents() {
		w.setPosition(events.FromProto(m.Position))
	}
}

// Left records that the watch has left a broadcast at a position, with the time of its next bookmark.
func (w *Watch) Left(p events.Position, nextBookmark time.Time) {
	w.request.ResumeAfter, w.NextBookmark = p.Proto(), nextBookmark
}

// ValidBoundaries reports if the boundaries of a frame's events are in order and within its data.
func ValidBoundaries(m *watchfanoutv1.WatchFrame) bool {
	end := int32(0)
	for _, b := range m.Boundaries {
		if b.End < end || int(b.End) > len(m.Data) {
			return false
		}
		end = b.End
	}
	return true
}

// WithoutEarlyBookmarks returns a frame's data without the bookmarks that are not due. Bookmarks are due every period,
// and always after last.
func (w *Watch) WithoutEarlyBookmarks(m *watchfanoutv1.WatchFrame, now, last time.Time, period time.Duration) []byte {
	if !slices.ContainsFunc(m.Boundaries, func(k *watchfanoutv1.EventBoundary) bool { return k.Bookmark }) {
		return m.Data
	}
	var data []byte
	offset := int32(0)
	for _, k := range m.Boundaries {
		part := m.Data[offset:k.End]
		offset = k.End
		if k.Bookmark {
			if !w.request.AllowBookmarks || now.Before(w.NextBookmark) && now.Before(last) {
				continue
			}
			w.NextBookmark = now.Add(period)
		}
		data = append(data, part...)
	}
	return data
}
