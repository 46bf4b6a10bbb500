package core

import (
	"strconv"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Message is a message to append to the log.
type Message struct {
	ID ID
	// Expected is the ID that the log's last message must have. If First is true, the log must end at ExpectedSequence
	// instead: the message begins the log.
	Expected         ID
	First            bool
	ExpectedSequence uint64
	Event            *logv1.Event
	// Payload is the encoded event.
	Payload any
}

// Joins returns true if the log may store the message together with the message before it. Both must be events of the
// same resource, because a reader of a resource receives only the messages of that resource, progress and resets.
func (m *Message) Joins(before *Message) bool {
	return isEvent(m.Event) && isEvent(before.Event) && m.Event.StorageResource == before.Event.StorageResource &&
		m.Expected == before.ID && !m.First
}

// Encode encodes an event. An error means that the event cannot be a message.
type Encode func(*logv1.Event) (payload any, err error)

// Chain makes messages of which each expects its predecessor. The log accepts no other message. Two chains that
// begin after the same message cannot both continue.
type Chain struct {
	// Last is the ID of the last message.
	Last ID
	// nonce, with the number of the message, distinguishes this chain's IDs from the IDs of other chains.
	nonce  string
	length int
	// first is true if the next message expects a sequence instead of an ID.
	first    bool
	sequence uint64
	encode   Encode
}

// NewChain returns a chain that continues after last, the ID of the log's last message.
func NewChain(nonce string, last ID, encode Encode) Chain {
	return Chain{nonce: nonce, Last: last, encode: encode}
}

// Restart makes the next message begin the log again, after the message with the stream's last sequence. The next
// message must be a reset.
func (c *Chain) Restart(sequence uint64) { c.first, c.sequence = true, sequence }

// Has returns true if the log already holds an event, because it ended inside the event's transaction when the chain
// began.
func (c *Chain) Has(e *logv1.Event) bool {
	return !c.Last.Progress && e.Revision == c.Last.Revision && e.Index <= c.Last.Index
}

// Append returns the message of an event. An error means that the event cannot be a message. The chain is then
// unchanged.
func (c *Chain) Append(e *logv1.Event) (Message, error) {
	payload, err := c.encode(e)
	if err != nil {
		return Message{}, err
	}
	c.length++
	m := Message{
		ID:               IDOf(e, c.nonce+strconv.Itoa(c.length)),
		Expected:         c.Last,
		First:            c.first,
		ExpectedSequence: c.sequence,
		Event:            e,
		Payload:          payload,
	}
	c.Last, c.first = m.ID, false
	return m, nil
}
