package watch

import (
	"container/heap"
	"sync"
	"time"
)

// wakeups wakes watches at set times, with a single timer. A timer of each watch would slow every response: when a
// timer that was reset is due, Go's runtime searches all timers of the processor (runtime.timers.adjust). Its zero
// value is ready to use.
type wakeups struct {
	mu    sync.Mutex
	heap  wakeupHeap
	timer *time.Timer
}

// wakeup is the time at which a watch wakes. The lock of wakeups guards it.
type wakeup struct {
	at    time.Time
	index int // in the heap, if the heap has the watch there
}

// set wakes a watch at a time, instead of the time that was set before.
func (s *wakeups) set(w *clientWatch, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.wakeup.at = at; s.has(w) {
		heap.Fix(&s.heap, w.wakeup.index)
	} else {
		heap.Push(&s.heap, w)
	}
	if w.wakeup.index == 0 {
		s.startTimer()
	}
}

// clear removes the time at which a watch wakes.
func (s *wakeups) clear(w *clientWatch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.has(w) {
		heap.Remove(&s.heap, w.wakeup.index)
	}
}

// has returns whether a watch has a time. The lock is held.
func (s *wakeups) has(w *clientWatch) bool {
	i := w.wakeup.index
	return i < len(s.heap) && s.heap[i] == w
}

// startTimer sets the timer to the first time. The lock is held.
func (s *wakeups) startTimer() {
	delay := time.Until(s.heap[0].wakeup.at)
	if s.timer == nil {
		s.timer = time.AfterFunc(delay, s.wake)
	} else {
		s.timer.Reset(delay)
	}
}

// wake wakes the watches whose time has passed.
func (s *wakeups) wake() {
	for _, w := range s.expired(time.Now()) {
		w.wake()
	}
}

// expired removes and returns the watches whose time is not after now.
func (s *wakeups) expired(now time.Time) (watches []*clientWatch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.heap) > 0 && !s.heap[0].wakeup.at.After(now) {
		watches = append(watches, heap.Pop(&s.heap).(*clientWatch))
	}
	if len(s.heap) > 0 {
		s.startTimer()
	}
	return watches
}

// wakeupHeap implements heap.Interface. The first watch wakes first.
type wakeupHeap []*clientWatch

func (h wakeupHeap) Len() int           { return len(h) }
func (h wakeupHeap) Less(i, j int) bool { return h[i].wakeup.at.Before(h[j].wakeup.at) }
func (h wakeupHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].wakeup.index, h[j].wakeup.index = i, j
}

// Push implements heap.Interface.
func (h *wakeupHeap) Push(x any) {
	w := x.(*clientWatch)
	w.wakeup.index = len(*h)
	*h = append(*h, w)
}

// Pop implements heap.Interface.
func (h *wakeupHeap) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return w
}
