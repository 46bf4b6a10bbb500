// Package events is shared by the readers of the event log: positions of events, a ring of recent events, and the
// classification of an event for a selector. It does not read the log, and starts no goroutine.
package events

import (
	"cmp"

	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// LastIndex is greater than the index of every event of a revision.
const LastIndex = 1<<31 - 1

// Position is a place in the history of etcd: after an event, or after a whole revision if Index is LastIndex.
type Position struct {
	Revision int64
	Index    int32
	// Epoch is the epoch of etcd that Revision belongs to. Empty: unknown.
	Epoch string
}

// PositionOf returns the position of an event.
func PositionOf(e *logv1.Event) Position { return Position{e.Revision, e.Index, e.Epoch} }

// FromProto converts a protobuf position.
func FromProto(p *watchfanoutv1.Position) Position {
	return Position{p.GetRevision(), p.GetIndex(), p.GetEpoch()}
}

// Proto converts the position to protobuf.
func (p Position) Proto() *watchfanoutv1.Position {
	return &watchfanoutv1.Position{Revision: p.Revision, Index: p.Index, Epoch: p.Epoch}
}

// Before returns true if p is before q in the same epoch.
func (p Position) Before(q Position) bool {
	return cmp.Or(cmp.Compare(p.Revision, q.Revision), cmp.Compare(p.Index, q.Index)) < 0
}

// DifferentEpoch returns true if both epochs are known and differ. Neither position is then before the other.
func (p Position) DifferentEpoch(q Position) bool {
	return p.Epoch != "" && q.Epoch != "" && p.Epoch != q.Epoch
}
