package handlers

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// ownerSlots bounds how many operations of an owner run at once. Further operations wait in order. The zero value is
// ready to use.
type ownerSlots struct {
	mu     sync.Mutex
	owners map[string]*slots
}

// slots are an owner's. holders are the operations that run or wait.
type slots struct {
	free    *semaphore.Weighted
	holders int
}

// acquire waits until fewer than `most` operations of the owner run, or ctx ends. Call release after the operation. The
// empty owner has no bound.
func (s *ownerSlots) acquire(ctx context.Context, owner string, most int64) (release func(), err error) {
	if owner == "" {
		return func() {}, nil
	}
	s.mu.Lock()
	o := s.owners[owner]
	if o == nil {
		o = &slots{free: semaphore.NewWeighted(most)}
		if s.owners == nil {
			s.owners = map[string]*slots{}
		}
		s.owners[owner] = o
	}
	o.holders++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if o.holders--; o.holders == 0 {
			delete(s.owners, owner)
		}
	}
	if err := o.free.Acquire(ctx, 1); err != nil {
		leave()
		return nil, err
	}
	return func() {
		o.free.Release(1)
		leave()
	}, nil
}
