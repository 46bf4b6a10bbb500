package watch

import "time"

// BoundInFlight sets the limit of bytes in flight.
func (s *Server) BoundInFlight(n int64) { s.inflight = newInflightQuota(n) }

// Waiting returns the number of an owner's waiting messages.
func (s *Server) Waiting(owner string) int {
	s.inflight.mu.Lock()
	defer s.inflight.mu.Unlock()
	if o := s.inflight.owners[owner]; o != nil {
		return len(o.waiting)
	}
	return 0
}

// Draining reports whether Drain was called.
func (s *Server) Draining() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

// Schedule is schedule.
func (m *Multiplexer) Schedule(n, all int) (ticks uint64, interval time.Duration) {
	return m.schedule(n, all)
}
