package handlers

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/semaphore"
)

// ownerSlots bounds how many operations of an owner run at once (perOwner). Further operations wait in order, at most
// maxWaiting of an owner.
type ownerSlots struct {
	perOwner   int64
	maxWaiting int

	mu     sync.Mutex
	owners map[string]*slots
}

// slots are the slots of an owner. holders counts the operations that run or wait.
type slots struct {
	free    *semaphore.Weighted
	holders int
}

// errBusy is the error of an operation whose owner has too many that wait.
var errBusy = errors.New("too many operations of the owner wait")

// acquire waits until fewer than perOwner operations of the owner run, or ctx ends. Call release after the operation,
// also after an error. The empty owner has no bound.
func (s *ownerSlots) acquire(ctx context.Context, owner string) (release func(), err error) {
	if owner == "" {
		return func() {}, nil
	}
	s.mu.Lock()
	o := s.owners[owner]
	if o == nil {
		o = &slots{free: semaphore.NewWeighted(s.perOwner)}
		if s.owners == nil {
			s.owners = map[string]*slots{}
		}
		s.owners[owner] = o
	}
	if o.holders >= int(s.perOwner)+s.maxWaiting {
		s.mu.Unlock()
		return func() {}, errBusy
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
		return func() {}, err
	}
	return func() {
		o.free.Release(1)
		leave()
	}, nil
}
