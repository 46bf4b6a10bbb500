package streams

// BoundInFlight sets the bytes that the streams may have in flight.
func (s *Streams) BoundInFlight(n int64) { s.inFlight = newInFlight(n) }

// Waiting returns the number of an owner's messages that wait.
func (s *Streams) Waiting(owner string) int {
	s.inFlight.mu.Lock()
	defer s.inFlight.mu.Unlock()
	if o := s.inFlight.owners[owner]; o != nil {
		return len(o.waiting)
	}
	return 0
}
