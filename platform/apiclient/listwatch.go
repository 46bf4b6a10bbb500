package apiclient

import (
	"context"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// ListWatch lists and watches a resource for a single informer whose age does not count. While the event log stalls,
// the watch lists once in each round of the Cluster's lists. It then sends the differences and a bookmark, and ends.
//
// A watch has a goroutine, which ends with the watch. The informer calls List before Watch, and runs a single watch at
// a time. A round compares no revisions, because the resource may be in another etcd (--etcd-servers-overrides). The
// watches of a Cluster list in turns. A watch lists again after ten times the duration of its last list, so large
// resources take a tenth of a processor at most. After a failed list, the pause is twice as long.
type ListWatch struct {
	// Lister and Watcher are the client's calls.
	Lister  cache.ListWithContextFunc
	Watcher cache.WatchFuncWithContext
	// Example is an empty object of the informer's type.
	Example runtime.Object
	Cluster *Cluster

	mu sync.Mutex
	// known has the objects that the informer has received.
	known known
	// round is the last round in which the informer or its watch has listed.
	round int64
	// pause is the time between two lists, and earliest the time of the next.
	pause    time.Duration
	earliest time.Time
}

// NewListWatch returns a ListWatch of a client of a resource. example is an empty object of the resource.
func NewListWatch[L runtime.Object](c interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}, example runtime.Object, cluster *Cluster) *ListWatch {
	return &ListWatch{
		Lister:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, o) },
		Watcher: c.Watch,
		Example: example,
		Cluster: cluster,
	}
}

// known maps the names of an informer's objects to their resourceVersions.
type known map[cache.ObjectName]string

// Informer returns the ListWatch in the form that informers read. They list, and do not use watch lists.
func (l *ListWatch) Informer() cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(
		&cache.ListWatch{ListWithContextFunc: l.List, WatchFuncWithContext: l.Watch}, listClient{})
}

// List lists all objects for the informer. It ignores the options, so that the list is consistent.
func (l *ListWatch) List(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
	round, _ := l.Cluster.rounds.Get()
	list, err := l.Lister(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	k := known{}
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		m, err := meta.Accessor(obj)
		if err == nil {
			k[cache.MetaObjectToName(m)] = m.GetResourceVersion()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.known, l.round = k, round
	return list, nil
}

// Watch watches the objects for the informer.
func (l *ListWatch) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	inner, err := l.Watcher(ctx, o)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &listedWatch{ListWatch: l, inner: inner, cancel: cancel, events: make(chan watch.Event)}
	w.position, _ = strconv.ParseInt(o.ResourceVersion, 10, 64)
	go w.run(ctx)
	return w, nil
}

// listedWatch is a watch of ListWatch.
type listedWatch struct {
	*ListWatch
	inner  watch.Interface
	cancel context.CancelFunc
	// events has no buffer: the informer has received an event when it is sent.
	events chan watch.Event
	// position is the revision that the informer has reached.
	position int64
}

// Stop implements watch.Interface.
func (w *listedWatch) Stop() { w.cancel() }

// ResultChan implements watch.Interface.
func (w *listedWatch) ResultChan() <-chan watch.Event { return w.events }

func (w *listedWatch) run(ctx context.Context) {
	defer close(w.events)
	defer w.cancel()
	defer w.inner.Stop()
	for {
		round, next := w.Cluster.rounds.Get()
		wait, behind := w.untilList(round)
		if behind && wait <= 0 {
			events := w.listAlone(ctx, round)
			for _, e := range events {
				if !w.send(ctx, e) {
					return
				}
			}
			if len(events) > 0 {
				return
			}
			wait, behind = w.untilList(round)
		}
		var due <-chan time.Time // nil: the informer has listed in this round
		if behind {
			due = time.After(wait)
		}
		select {
		case e, ok := <-w.inner.ResultChan():
			if !ok || !w.send(ctx, e) {
				return
			}
		case <-next:
		case <-due:
		case <-ctx.Done():
			return
		}
	}
}

// untilList returns the time until the next list. behind is false if the informer has listed in the round.
func (l *ListWatch) untilList(round int64) (wait time.Duration, behind bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.earliest), l.round < round
}

// listAlone lists in a round while no other watch of the Cluster lists. It sets the time of the next list.
func (w *listedWatch) listAlone(ctx context.Context, round int64) []watch.Event {
	select {
	case w.Cluster.listing <- struct{}{}:
		defer func() { <-w.Cluster.listing }()
	case <-ctx.Done():
		return nil
	}
	began := time.Now()
	events, err := w.list(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.round, w.pause = round, 10*time.Since(began)
	} else {
		w.pause = min(max(stalledAfter, 2*w.pause), maxListPause)
	}
	w.earliest = time.Now().Add(w.pause)
	return events
}

// maxListPause bounds the pause after failed lists.
const maxListPause = time.Minute

// send sends an event. The informer knows it afterwards.
func (w *listedWatch) send(ctx context.Context, e watch.Event) bool {
	select {
	case w.events <- e:
	case <-ctx.Done():
		return false
	}
	m, err := meta.Accessor(e.Object)
	if err != nil || e.Type == watch.Error {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch name := cache.MetaObjectToName(m); e.Type {
	case watch.Added, watch.Modified:
		if w.known == nil {
			w.known = known{}
		}
		w.known[name] = m.GetResourceVersion()
	case watch.Deleted:
		delete(w.known, name)
	}
	if revision, err := strconv.ParseInt(m.GetResourceVersion(), 10, 64); err == nil {
		w.position = max(w.position, revision)
	}
	return true
}

// list returns the events that change the informer's content to a new list. The last is a bookmark. It returns no
// events if the watch is not behind the list.
func (w *listedWatch) list(ctx context.Context) ([]watch.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, w.Cluster.timeout())
	defer cancel()
	list, err := w.Lister(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	l, err := meta.ListAccessor(list)
	if err != nil {
		return nil, err
	}
	revision, err := strconv.ParseInt(l.GetResourceVersion(), 10, 64)
	if err != nil || revision <= w.position {
		return nil, err
	}
	var events []watch.Event
	inList := map[cache.ObjectName]bool{}
	w.mu.Lock()
	defer w.mu.Unlock()
	// An object of an event must not keep the list in memory.
	err = meta.EachListItemWithAlloc(list, func(obj runtime.Object) error {
		m, err := meta.Accessor(obj)
		if err != nil {
			return err
		}
		name := cache.MetaObjectToName(m)
		inList[name] = true
		if version, ok := w.known[name]; !ok {
			events = append(events, watch.Event{Type: watch.Added, Object: obj})
		} else if version != m.GetResourceVersion() {
			events = append(events, watch.Event{Type: watch.Modified, Object: obj})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// event returns an event of an object that has only the metadata of a key.
	event := func(t watch.EventType, name cache.ObjectName) error {
		obj := w.Example.DeepCopyObject()
		m, err := meta.Accessor(obj)
		if err != nil {
			return err
		}
		m.SetNamespace(name.Namespace)
		m.SetName(name.Name)
		m.SetResourceVersion(l.GetResourceVersion())
		events = append(events, watch.Event{Type: t, Object: obj})
		return nil
	}
	for name := range w.known {
		if !inList[name] {
			if err := event(watch.Deleted, name); err != nil {
				return nil, err
			}
		}
	}
	err = event(watch.Bookmark, cache.ObjectName{})
	return events, err
}
