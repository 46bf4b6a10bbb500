// Package events has what all who read the event log share, whatever they keep of it: where an event stands, the ring
// of the recent ones, and what a selection sees of one.
package events

import (
	"cmp"

	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// LastIndex is past every event of a revision.
const LastIndex = 1<<31 - 1

// Position is a place in etcd's history: after an event, or after a revision where Index is LastIndex.
type Position struct {
	Revision int64
	Index    int32
	// Epoch is that of etcd which the revision is of; empty where nobody has said.
	Epoch string
}

// PositionOf is an event's place.
func PositionOf(e *logv1.Event) Position { return Position{e.Revision, e.Index, e.Epoch} }

// FromProto is a place as the contracts have it.
func FromProto(p *watchfanoutv1.Position) Position {
	return Position{p.GetRevision(), p.GetIndex(), p.GetEpoch()}
}

// Proto is the place for the contracts.
func (p Position) Proto() *watchfanoutv1.Position {
	return &watchfanoutv1.Position{Revision: p.Revision, Index: p.Index, Epoch: p.Epoch}
}

// Before says whether p comes before q, in one history.
func (p Position) Before(q Position) bool {
	return cmp.Or(cmp.Compare(p.Revision, q.Revision), cmp.Compare(p.Index, q.Index)) < 0
}

// DifferentEpoch says whether the two are known to be of different histories of etcd: then neither is before the other.
func (p Position) DifferentEpoch(q Position) bool {
	return p.Epoch != "" && q.Epoch != "" && p.Epoch != q.Epoch
}
