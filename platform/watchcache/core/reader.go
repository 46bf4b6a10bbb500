package core

import (
	"errors"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Reader is a reader's position in the log's stream. It receives messages live, which may be missing or repeated, and
// from the stream, which is in order. It finds gaps, a stream that was recreated, and a stream that lost its end. The
// zero value begins at the stream's beginning.
type Reader struct {
	// Sequence is the sequence of the last message, and id its ID.
	Sequence uint64
	id       string
	// created distinguishes streams of the same name.
	created int64
	// afterGap is true if the log no longer holds the last message, so the next message follows a gap.
	afterGap bool
}

// ErrMissed means that a message does not follow the last message: the reader must read the stream.
var ErrMissed = errors.New("messages of the event log were missed")

// Request returns the request for the rest of the stream. It begins with the last message, because another may have
// replaced it: the stream lost its end, and has the same length again.
func (r *Reader) Request() *logv1.ReadRequest { return &logv1.ReadRequest{Sequence: r.Sequence} }

// Live returns whether a live message with a sequence is the next, or ErrMissed. It is false for a message that the
// reader has.
func (r *Reader) Live(sequence uint64) (next bool, err error) {
	if sequence > r.Sequence+1 {
		return false, ErrMissed
	}
	return sequence == r.Sequence+1, nil
}

// Reposition returns true if the stream does not continue at the reader's position. It then moves the reader, which
// must read again.
func (r *Reader) Reposition(c *logv1.Chunk) bool {
	previous := r.created
	r.created = c.Created
	switch {
	case r.Sequence == 0:
		return false
	case c.Created != previous: // another stream: read its beginning, which is a reset
		r.Sequence, r.id, r.afterGap = 0, "", true
		return true
	case c.Last < r.Sequence: // the stream lost its end, and its messages up to Last may differ
		r.Sequence, r.id, r.afterGap = c.Last, "", true
		return true
	}
	return false
}

// Next moves the reader to a message with its events, which are nil if the message is corrupt. It returns the events to
// apply, and the reset to apply before them if the message does not follow the last message. Only a message of the
// stream proves such a gap. For a live message, Next returns ErrMissed. It returns no events for the message that the
// reader is at. A corrupt message is as good as lost, because its position may be wrong too: the next message is the
// first after a gap.
func (r *Reader) Next(m *logv1.StoredMessage, events []*logv1.Event, live bool) (gap *logv1.Event,
	apply []*logv1.Event, err error) {
	if m.Sequence == r.Sequence && m.Id == r.id {
		return nil, nil, nil
	}
	if len(events) == 0 {
		if live {
			return nil, nil, ErrMissed
		}
		r.afterGap, r.id, r.Sequence = true, "", m.Sequence
		return nil, nil, nil
	}
	first := events[0]
	resetsAll := first.Type == logv1.Type_TYPE_RESET && first.StorageResource == ""
	if !resetsAll && (r.afterGap || r.id != "" && m.ExpectedLastMsgId != r.id) {
		if live {
			return nil, nil, ErrMissed
		}
		gap = &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: before(first)}
	}
	r.afterGap, r.id, r.Sequence = false, m.Id, m.Sequence
	return gap, events, nil
}

// before returns the revision before an event: every later event follows in the log.
func before(e *logv1.Event) int64 {
	if IsChange(e) && e.Index == 0 {
		return e.Revision - 1
	}
	return e.Revision
}

// ErrExpired means that the log does not hold all messages after a revision.
var ErrExpired = errors.New("the event log has expired messages after this revision")

// Replay is a position of a reader of a resource's events after a revision, in an epoch.
type Replay struct {
	after     int64
	epoch     string
	delivered bool
	created   int64
	// sequence is the sequence of the last message that the replay has read, and id its ID. 0: it has read none.
	sequence uint64
	id       string
	// again is true until the first chunk of a read that begins with the last message.
	again bool
}

// NewReplay returns a replay of the events after a revision of an epoch.
func NewReplay(after int64, epoch string) *Replay { return &Replay{after: after, epoch: epoch} }

// Request returns the request for the rest of the stream. It begins with the last message, because others may have
// replaced it and the messages after it, as in Reader.Request.
func (r *Replay) Request(storageResource string) *logv1.ReadRequest {
	if r.sequence == 0 {
		return &logv1.ReadRequest{StorageResource: storageResource, After: r.after}
	}
	r.again = true
	return &logv1.ReadRequest{StorageResource: storageResource, Sequence: r.sequence}
}

// Chunk moves the replay over a chunk, and returns the chunk's messages that the replay has not read yet. It returns
// ErrMissed if the stream is another, or has lost its end: the caller may begin another replay after its last complete
// revision.
func (r *Replay) Chunk(c *logv1.Chunk) ([]*logv1.StoredMessage, error) {
	messages := c.Messages
	if r.created != 0 && (c.Created != r.created || c.Last < r.sequence) {
		return nil, ErrMissed
	}
	if r.again {
		if len(messages) == 0 || messages[0].Sequence != r.sequence || messages[0].Id != r.id {
			return nil, ErrMissed
		}
		messages, r.again = messages[1:], false
	}
	r.created = c.Created
	if n := len(messages); n > 0 {
		r.sequence, r.id = messages[n-1].Sequence, messages[n-1].Id
	}
	return messages, nil
}

// Next returns whether an event is part of the replay. It returns ErrExpired at a reset and for an event of another
// epoch. The events before that have no gap.
func (r *Replay) Next(e *logv1.Event) (bool, error) {
	switch {
	case r.epoch != "" && e.Epoch != "" && e.Epoch != r.epoch,
		e.Type == logv1.Type_TYPE_RESET && (r.delivered || e.Revision > r.after):
		return false, ErrExpired
	case e.Revision <= r.after:
		return false, nil
	}
	r.delivered = true
	return true, nil
}
