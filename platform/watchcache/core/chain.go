package core

import (
	"strconv"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// LogEntry is an event, a progress message or a reset, with its place in the chain. A message of the stream holds a
// LogEntry, or several.
type LogEntry struct {
	ID ID
	// Expected is the ID that the log's last entry must have. If First is true, the log must end at ExpectedSequence
	// instead: the entry begins the log.
	Expected         ID
	First            bool
	ExpectedSequence uint64
	Event            *logv1.Event
	// Payload is the encoded event.
	Payload any
}

// Joins returns true if a message may hold the entry together with the entry before it. Both must be changes of the
// same resource, because a reader of a resource receives only the messages of that resource, progress and resets.
func (e *LogEntry) Joins(before *LogEntry) bool {
	return IsChange(e.Event) && IsChange(before.Event) && e.Event.StorageResource == before.Event.StorageResource &&
		e.Expected == before.ID && !e.First
}

// Encode encodes an event. An error means that no message can hold the event.
type Encode func(*logv1.Event) (payload any, err error)

// Chain makes entries of which each expects its predecessor. The log accepts no other entry. Two chains that begin
// after the same entry cannot both continue.
type Chain struct {
	// Last is the ID of the last entry.
	Last ID
	// nonce, with the number of the entry, distinguishes this chain's IDs from the IDs of other chains.
	nonce  string
	length int
	// first is true if the next entry expects a sequence instead of an ID.
	first    bool
	sequence uint64
	encode   Encode
}

// NewChain returns a chain that continues after last, the ID of the log's last entry.
func NewChain(nonce string, last ID, encode Encode) Chain {
	return Chain{nonce: nonce, Last: last, encode: encode}
}

// Restart makes the next entry begin the log again, after the message with the stream's last sequence. The next entry
// must be a reset.
func (c *Chain) Restart(sequence uint64) { c.first, c.sequence = true, sequence }

// Has returns true if the log already holds an event, because it ended inside the event's transaction when the chain
// began.
func (c *Chain) Has(e *logv1.Event) bool {
	return !c.Last.Progress && e.Revision == c.Last.Revision && e.Index <= c.Last.Index
}

// Append returns the entry of an event. An error means that no message can hold the event. The chain is then unchanged.
func (c *Chain) Append(e *logv1.Event) (LogEntry, error) {
	payload, err := c.encode(e)
	if err != nil {
		return LogEntry{}, err
	}
	c.length++
	entry := LogEntry{
		ID:               IDOf(e, c.nonce+strconv.Itoa(c.length)),
		Expected:         c.Last,
		First:            c.first,
		ExpectedSequence: c.sequence,
		Event:            e,
		Payload:          payload,
	}
	c.Last, c.first = entry.ID, false
	return entry, nil
}
