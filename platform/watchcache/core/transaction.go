package core

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ErrPrevCompacted means that etcd has compacted the previous state of an object. A watch with a selector then cannot
// see whether the object left the selection, so the log is reset.
var ErrPrevCompacted = errors.New("etcd compacted the object's previous state")

// Change is an etcd event, decoded.
type Change struct {
	EtcdEvent
	// Object is the key of the object in its resource, as ObjectHash has it. Previous is the object's revision before
	// the event; 0: it did not exist.
	Object   string
	Previous int64
	// Event is the event to publish. Nil: no served resource has the key, or Err is set.
	Event *logv1.Event
	// Resource is the stored resource of the key; empty if no served resource has the key.
	Resource string
	// CRDChanged is the stored resource whose objects decode differently after the event, if the event is of its CRD.
	CRDChanged string
	// Err is the reason why the event cannot be published. It resets Resource.
	Err error
}

// transaction is the entries of an etcd revision: changes first, then resets.
type transaction struct {
	revision       int64
	size           int // the number of etcd events
	events, resets []*logv1.Event
}

// reset adds the reset of a resource for event i. Its index follows all events and depends only on i. Every publisher
// therefore gives it the same index, also if it resumes within the transaction.
func (x *transaction) reset(i int, storageResource string, crdChanged bool) {
	index := x.size + 2*i
	if crdChanged {
		index++
	}
	x.resets = append(x.resets, &logv1.Event{
		Type:            logv1.Type_TYPE_RESET,
		Revision:        x.revision,
		StorageResource: storageResource,
		CrdChanged:      crdChanged,
		Index:           int32(index),
	})
}

// Transaction publishes the events of an etcd revision. Readers apply them together. An event that cannot be published
// resets only its resource. The log may end within the transaction: only the rest is published then.
//
// Readers would ignore events up to the last progress. etcd before 3.4.31 and 3.5.13 may send progress before such an
// event (etcd 15220, 17507). The log is then reset.
func (t *Term) Transaction(changes []Change) {
	if last := t.chain.Last; last.Progress && changes[0].Revision <= last.Revision {
		t.reset(Request{Op: ReadRevision}, fmt.Sprintf("etcd sent the revision %d after the progress of %d",
			changes[0].Revision, last.Revision))
		return
	}
	x := transaction{revision: changes[0].Revision, size: len(changes)}
	for i, c := range changes {
		switch {
		case errors.Is(c.Err, ErrPrevCompacted):
			t.reset(Request{Op: ReadRevision}, c.Err.Error())
			return
		case c.Err != nil && c.Resource != "":
			x.reset(i, c.Resource, false)
		case c.Err == nil && c.Event != nil:
			c.Event.Index = int32(i)
			x.events = append(x.events, c.Event)
		}
		if c.CRDChanged != "" {
			x.reset(i, c.CRDChanged, true)
		}
	}
	t.beginSums()
	for n, e := range x.events {
		// The resets belong to the same transaction, because readers apply it as a whole.
		e.More = n < len(x.events)-1 || len(x.resets) > 0
		if err := t.appendOnce(e); err != nil {
			x.reset(int(e.Index), e.StorageResource, false)
		}
	}
	slices.SortFunc(x.resets, func(a, b *logv1.Event) int { return cmp.Compare(a.Index, b.Index) })
	for n, e := range x.resets {
		e.More = n < len(x.resets)-1
		if !t.chain.Has(e) {
			t.appendControl(e)
		}
	}
	t.transactionCompleted = true
	t.sums.add(changes)
	t.beginSums() // if the log ended within this transaction
}

// appendOnce appends an event unless the log has it. It returns an error if the event cannot be a message, even if the
// log is past it.
func (t *Term) appendOnce(e *logv1.Event) error {
	if t.chain.Has(e) {
		_, err := t.chain.encode(t.stamp(e))
		return err
	}
	return t.append(e)
}
