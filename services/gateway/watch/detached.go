package watch

import (
	"context"
	"sync"

	"watershed.dev/platform/recovery"
)

// A detached watch is idle without a goroutine, and without the state of its request. Its handler has returned, and its
// broadcast writes its events (h2writer.Stream.Detach).
//
//	attached --- detach ---> running --- park ---> parked --- wake ---> running --- ended.
//
// A goroutine runs the watch while it is running. wake is called if the broadcast needs the watch's goroutine, at the
// watch's time (wakeups), when the client closes the stream, and when Stopping or policyChanged is closed (signals).

// detach detaches the watch if it may be. The handler's goroutine still runs the watch.
func (w *clientWatch) detach() bool {
	if w.detachTried || w.Detached == nil || w.stream == nil {
		return false
	}
	w.detachTried = true
	w.detached = w.stream.Detach(w.clientClosed)
	if w.detached { // the initial events are sent, so only the request's state goes with these
		w.sink, w.Initialized = nil, nil
		w.hub.signals.add(w.Stopping, w)
	}
	return w.detached
}

// park lets the goroutine end, unless the watch was woken meanwhile.
func (w *clientWatch) park() bool {
	if w.subscribed != w.policyChanged {
		w.hub.signals.remove(w.subscribed, w)
		w.subscribed = w.policyChanged
		w.hub.signals.add(w.subscribed, w)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.woken:
		return false
	default:
	}
	w.parked, w.cancel = true, nil
	return true
}

// wake makes the watch's goroutine check everything again, and starts it if the watch is parked. It takes no lock but
// w.mu.
func (w *clientWatch) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.parked {
		w.parked = false
		go w.resume()
		return
	}
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

// clientClosed ends a detached watch.
func (w *clientWatch) clientClosed() {
	w.mu.Lock()
	w.closed = true
	cancel := w.cancel
	w.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	w.wake()
}

// isClosed reports whether the client has closed a detached watch.
func (w *clientWatch) isClosed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closed
}

// resume runs a detached watch until it is parked or ends.
func (w *clientWatch) resume() {
	ctx, cancel := context.WithCancel(w.Detached)
	defer cancel()
	w.mu.Lock()
	w.cancel = cancel
	if w.closed {
		cancel()
	}
	w.mu.Unlock()
	parked, err := w.runRecovered(ctx)
	if parked {
		return
	}
	if err == nil {
		w.endBody(ctx)
	}
	if endErr := w.endedRecovered(); err == nil {
		err = endErr
	}
	w.stream.End(err)
}

func (w *clientWatch) endedRecovered() (err error) {
	defer recovery.ToError("the end of a watch", &err)
	w.ended()
	return nil
}

func (w *clientWatch) runRecovered(ctx context.Context) (parked bool, err error) {
	defer recovery.ToError("a watch", &err)
	return w.run(ctx), nil
}

// signals wakes parked watches when a channel is closed. It has a goroutine for each channel. The zero value is ready
// to use.
type signals struct {
	mu     sync.Mutex
	groups map[<-chan struct{}]*signalGroup
}

// signalGroup is the watches that a channel wakes. unused is closed when it has none.
type signalGroup struct {
	members map[*clientWatch]struct{}
	unused  chan struct{}
}

func (s *signals) add(c <-chan struct{}, w *clientWatch) {
	if c == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[c]
	if g == nil {
		g = &signalGroup{members: map[*clientWatch]struct{}{}, unused: make(chan struct{})}
		if s.groups == nil {
			s.groups = map[<-chan struct{}]*signalGroup{}
		}
		s.groups[c] = g
		go s.wait(c, g)
	}
	g.members[w] = struct{}{}
}

func (s *signals) remove(c <-chan struct{}, w *clientWatch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.groups[c]
	if g == nil {
		return
	}
	if delete(g.members, w); len(g.members) == 0 {
		delete(s.groups, c)
		close(g.unused)
	}
}

func (s *signals) wait(c <-chan struct{}, g *signalGroup) {
	select {
	case <-c:
	case <-g.unused:
		return
	}
	s.mu.Lock()
	if s.groups[c] == g {
		delete(s.groups, c)
	}
	s.mu.Unlock()
	for w := range g.members { // no other goroutine has the group now
		w.wake()
	}
}
