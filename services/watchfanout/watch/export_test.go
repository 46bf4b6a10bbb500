package watch

// BoundInFlight sets the bytes that the streams may have in flight.
func (s *Server) BoundInFlight(n int64) { s.inflight = newInflightQuota(n) }

// Waiting returns the number of an owner's messages that wait.
func (s *Server) Waiting(owner string) int {
	s.inflight.mu.Lock()
	defer s.inflight.mu.Unlock()
	if o := s.inflight.owners[owner]; o != nil {
		return len(o.waiting)
	}
	return 0
}
