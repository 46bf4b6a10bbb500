package core

import (
	"strconv"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// LogEntry is an event, a progress message or a reset, with its place in the chain. A message of the stream holds a
// LogEntry, or several.
type LogEntry struct {
	ID ID
	// Expected is the ID that the log's last entry must have, unless First is true: the entry begins the log.
	Expected ID
	First    bool
	// Begin is the stream's last sequence when the entry's chain began.
	Begin uint64
	Event *logv1.Event
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
	// begin is the stream's last sequence when the chain began. first is true if the next entry begins the log.
	begin  uint64
	first  bool
	encode Encode
}

// NewChain returns a chain that continues after last, the ID of the log's last entry, and after the stream's last
// sequence.
func NewChain(nonce string, last ID, sequence uint64, encode Encode) Chain {
	return Chain{nonce: nonce, Last: last, begin: sequence, encode: encode}
}

// Restart makes the first entry of the chain begin the log again. It must be a reset.
func (c *Chain) Restart() { c.first = true }

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
		ID:       IDOf(e, c.nonce+strconv.Itoa(c.length)),
		Expected: c.Last,
		First:    c.first,
		Begin:    c.begin,
		Event:    e,
		Payload:  payload,
	}
	c.Last, c.first = entry.ID, false
	return entry, nil
}
