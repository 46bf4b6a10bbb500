package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// etcd is etcd's history in memory.
type etcd struct {
	mu        sync.Mutex
	history   [][]write // by revision
	compacted int64
	leader    string
	epoch     core.Epoch
	epochAt   int64
	down      bool // no read of its revision succeeds
	changed   chan struct{}
}

// write is a change of an object. previous is the revision of the object before it; 0: the object is created.
type write struct {
	resource, name string
	deleted        bool
	previous       int64
}

// storedChange is a write at its revision.
type storedChange struct {
	write
	revision int64
	index    int32
}

func (c storedChange) kind() logv1.Type {
	switch {
	case c.deleted:
		return logv1.Type_TYPE_DELETED
	case c.previous == 0:
		return logv1.Type_TYPE_ADDED
	}
	return logv1.Type_TYPE_MODIFIED
}

func (c storedChange) String() string {
	return fmt.Sprintf("%s %s at %d", strings.TrimPrefix(c.kind().String(), "TYPE_"), c.name, c.revision)
}

func newEtcd() *etcd {
	return &etcd{history: make([][]write, 2), changed: make(chan struct{})}
}

// commit adds a revision, and returns it. The caller holds mu.
func (e *etcd) commit(writes ...write) int64 {
	e.history = append(e.history, writes)
	close(e.changed)
	e.changed = make(chan struct{})
	return e.revisionLocked()
}

func (e *etcd) revisionLocked() int64 { return int64(len(e.history) - 1) }

// write commits a transaction of an object each of some resources. A deletion of an absent object creates it.
func (e *etcd) write(writes ...write) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range writes {
		w := &writes[i]
		w.previous = e.objects(w.resource, e.revisionLocked())[w.name]
		w.deleted = w.deleted && w.previous != 0
	}
	e.commit(writes...)
}

// objects returns the revisions of the objects of a resource at a revision. The caller holds mu.
func (e *etcd) objects(resource string, revision int64) map[string]int64 {
	all := map[string]int64{}
	for r, writes := range e.history[:revision+1] {
		for _, w := range writes {
			if w.resource == resource {
				if all[w.name] = int64(r); w.deleted {
					delete(all, w.name)
				}
			}
		}
	}
	return all
}

// changes returns the changes of a resource after a revision, in order.
func (e *etcd) changes(resource string, after int64) (all []storedChange) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for r := after + 1; r <= e.revisionLocked(); r++ {
		for i, w := range e.history[r] {
			if w.resource == resource {
				all = append(all, storedChange{w, r, int32(i)})
			}
		}
	}
	return all
}

var errEtcdDown = errors.New("etcd does not respond")

// revision returns etcd's revision, as registry returns it to replicas.
func (e *etcd) revision(context.Context) (int64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down {
		return 0, errEtcdDown
	}
	return e.revisionLocked(), nil
}

// rows returns the objects of a resource at a revision.
func (e *etcd) rows(resource string, revision int64) (rows []*registryv1.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	objects := e.objects(resource, revision)
	for name, r := range objects {
		rows = append(rows, &registryv1.Row{Namespace: "x", Name: name, Revision: r, Json: objectJSON(name, r)})
	}
	slices.SortFunc(rows, func(a, b *registryv1.Row) int { return strings.Compare(a.Name, b.Name) })
	return rows
}

func objectJSON(name string, revision int64) []byte {
	return fmt.Appendf(nil, `{"metadata":{"name":%q,"namespace":"x","resourceVersion":"%d"}}`, name, revision)
}

// state returns etcd's state as a term reads it.
func (e *etcd) state(event core.EtcdEvent) core.EtcdState {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := core.EtcdState{Epoch: e.epoch, ModRevision: e.epochAt, Revision: e.revisionLocked()}
	s.HasEvent = event.Key != "" && (event.Revision < e.compacted || event.Revision <= e.revisionLocked() &&
		slices.ContainsFunc(e.history[event.Revision], func(w write) bool {
			return w.resource+"/"+w.name == event.Key && w.deleted == event.Deleted
		}))
	return s
}

// writeEpoch writes the epoch's record, if its conditions hold.
func (e *etcd) writeEpoch(identity string, epoch core.Epoch, after int64) (int64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leader != identity || e.epochAt != after {
		return 0, core.ErrEpochChanged
	}
	e.epoch, e.epochAt = epoch, e.commit()
	return e.epochAt, nil
}

// transaction returns the changes of a revision as a term publishes them, and whether etcd has compacted the revision.
// changes is nil if etcd has not reached the revision, and empty if the revision has no change. changed is closed at
// the next revision.
func (e *etcd) transaction(revision int64) (changes []core.Change, compacted bool, changed <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if revision < e.compacted {
		return nil, true, nil
	}
	if revision > e.revisionLocked() {
		return nil, false, e.changed
	}
	changes = []core.Change{}
	for i, w := range e.history[revision] {
		s := storedChange{w, revision, int32(i)}
		c := core.Change{
			EtcdEvent: core.EtcdEvent{Key: w.resource + "/" + w.name, Revision: revision, Deleted: w.deleted},
			Resource:  w.resource,
			Object:    "x/" + w.name,
			Previous:  w.previous,
		}
		if w.previous != 0 && revision == e.compacted {
			c.Err = core.ErrPrevCompacted
		} else {
			c.Event = &logv1.Event{Type: s.kind(), Revision: revision, StorageResource: w.resource, Namespace: "x",
				Name: w.name, Object: &logv1.Object{Json: objectJSON(w.name, revision)}}
		}
		changes = append(changes, c)
	}
	return changes, false, nil
}
