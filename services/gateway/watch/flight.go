package watch

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/rpc"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Fifty informers that begin at once ask the same, and each is to have the whole of it. What they are sent is read once
// for all who ask while the one before has not answered: a flight. It begins after the last of them has asked, so each
// gets what is as fresh as what a stream of its own would bring (platform/coalesce has the same rule). A frame is kept
// until everybody in the flight has taken it; where all flights keep too much, each goes at the pace of its slowest.

const (
	// takeOffWithin is how long those who ask wait for the flight before theirs to answer.
	takeOffWithin = 100 * time.Millisecond
	// framesAhead is how many frames are read for several before any of them asks.
	framesAhead = 4
	// slowestWithin is how long the slowest in a flight may keep the others waiting where there is no room.
	slowestWithin = 5 * time.Second
)

// frames are what a session goes on with while it is alone.
type frames interface {
	Recv() (*watchfanoutv1.WatchFrame, error)
}

// flight is one stream for all who are in it.
type flight struct {
	hub *Hub

	mu      sync.Mutex
	members map[*passenger]struct{} // who have not left
	kept    []keptFrame
	base    int // the number of kept[0]
	wanted  int // how many frames there are to be
	err     error
	changed chan struct{} // closed when there is more
	demand  sync.Cond
	late    *time.Timer // runs while the slowest keeps the others waiting
	cancel  context.CancelFunc
}

// keptFrame is a frame, and how many are still to take it.
type keptFrame struct {
	frame *watchfanoutv1.WatchFrame
	left  int
}

// flights are those of one question: ahead has begun and not answered, and next is for those who ask now.
type flights struct{ ahead, next *flight }

// passenger is one session's part in a flight.
type passenger struct {
	ctx    context.Context
	flight *flight
	at     int
	err    error // why its part has ended before the flight
}

// board has the watch begin with others of its owner that ask the same; leave says that it goes on by itself.
func (h *Hub) board(ctx context.Context, storedAs string, r *watchfanoutv1.WatchRequest) (p *passenger, leave func(),
	err error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, nil, err
	}
	question := string(data)
	h.mu.Lock()
	of := h.flights[question]
	first := of == nil
	if first {
		of = &flights{}
		if h.flights == nil {
			h.flights = map[string]*flights{}
		}
		h.flights[question] = of
	}
	if of.next == nil {
		of.next = newFlight(h)
	}
	f := of.next
	p = &passenger{ctx: ctx, flight: f}
	f.mu.Lock()
	f.members[p] = struct{}{}
	alone := len(f.members) == 1
	f.mu.Unlock()
	if first {
		h.depart(ctx, question, of, storedAs, r)
	} else if alone {
		ahead := of.ahead
		own := context.WithoutCancel(ctx)
		wait := h.takeOff
		if wait == 0 {
			wait = takeOffWithin
		}
		time.AfterFunc(wait, func() { h.answered(own, question, ahead, storedAs, r) })
	}
	h.mu.Unlock()
	return p, p.leave, nil
}

func newFlight(h *Hub) *flight {
	f := &flight{hub: h, members: map[*passenger]struct{}{}, changed: make(chan struct{}), cancel: func() {}}
	f.demand.L = &f.mu
	return f
}

// depart begins the next flight, or forgets the question where nobody waits for one. The hub's lock is held.
func (h *Hub) depart(ctx context.Context, question string, of *flights, storedAs string,
	r *watchfanoutv1.WatchRequest) {
	f := of.next
	of.ahead, of.next = f, nil
	if f == nil {
		delete(h.flights, question)
		return
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f.mu.Lock()
	f.cancel = cancel
	empty := len(f.members) == 0
	f.mu.Unlock()
	if empty {
		cancel()
	}
	go f.run(own, storedAs, r, func() { h.answered(own, question, f, storedAs, r) })
}

// answered says that a flight has answered, or is not waited for any longer: the next one begins.
func (h *Hub) answered(ctx context.Context, question string, f *flight, storedAs string,
	r *watchfanoutv1.WatchRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if of := h.flights[question]; of != nil && of.ahead == f {
		h.depart(ctx, question, of, storedAs, r)
	}
}

// run reads the stream, as far as anybody asks for it.
func (f *flight) run(ctx context.Context, storedAs string, r *watchfanoutv1.WatchRequest, answered func()) {
	stream, err := f.hub.Client.Watch(rpc.WithHashKey(ctx, storedAs), r, grpc.WaitForReady(false))
	for first := true; ; first = false {
		var m *watchfanoutv1.WatchFrame
		if err == nil {
			m, err = stream.Recv()
		}
		if first {
			answered()
		}
		if !f.add(m, err) {
			return
		}
	}
}

// add adds a frame or the error that there is in place of one, and waits until another is asked for; false where none
// will be.
func (f *flight) add(m *watchfanoutv1.WatchFrame, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.err = err
	} else if n := len(f.members); n > 0 {
		f.kept = append(f.kept, keptFrame{m, n})
		f.hub.flown.Add(bytesOf(m))
	}
	f.tell()
	for f.err == nil && len(f.members) > 0 {
		crowded := f.crowded()
		if !crowded && f.base+len(f.kept) < f.wanted {
			return true
		}
		if crowded && f.late == nil {
			base := f.base
			f.late = time.AfterFunc(slowestWithin, func() { f.throwOut(base) })
		}
		f.demand.Wait()
	}
	return false
}

// tell has everybody look again. The lock is held.
func (f *flight) tell() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// crowded says whether there is no room for more: then the slowest says how fast the flight goes. The lock is held.
func (f *flight) crowded() bool {
	return len(f.kept) > 0 && f.hub.flown.Load() > f.hub.Config.FeedsBytes
}

// throwOut ends the part of those who have not taken the frame that the others wait behind: what they were sent of the
// initial events cannot be taken back, so they ask anew.
func (f *flight) throwOut(base int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.late = nil
	if f.crowded() && f.base == base && len(f.members) > 1 {
		for p := range f.members {
			if p.at == base {
				f.leave(p)
				p.err = errTooSlow
			}
		}
	}
	f.tell()
	f.demand.Signal()
}

var errTooSlow = status.Error(codes.Unavailable, "the watch is too slow for those who share its beginning")

func bytesOf(m *watchfanoutv1.WatchFrame) (n int64) {
	for _, p := range m.Initial {
		n += int64(len(p))
	}
	return n + int64(len(m.Data))
}

// take notes that one who was to take the frame with some number has it, or needs it no more. The lock is held.
func (f *flight) take(number int) {
	f.kept[number-f.base].left--
	for len(f.kept) > 0 && f.kept[0].left == 0 {
		f.hub.flown.Add(-bytesOf(f.kept[0].frame))
		f.kept[0].frame = nil
		f.kept = f.kept[1:]
		f.base++
		f.demand.Signal()
	}
}

// Recv is the next frame.
func (p *passenger) Recv() (*watchfanoutv1.WatchFrame, error) {
	f := p.flight
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		if p.err != nil {
			return nil, p.err
		}
		ahead := framesAhead
		if len(f.members) == 1 {
			ahead = 1
		}
		if f.wanted < p.at+ahead {
			f.wanted = p.at + ahead
			f.demand.Signal()
		}
		if i := p.at - f.base; i < len(f.kept) {
			m := f.kept[i].frame
			f.take(p.at)
			p.at++
			return m, nil
		}
		if f.err != nil {
			return nil, f.err
		}
		changed := f.changed
		f.mu.Unlock()
		select {
		case <-changed:
		case <-p.ctx.Done():
		}
		f.mu.Lock()
		if err := p.ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
	}
}

// leave ends the session's part. It must not be called while Recv is.
func (p *passenger) leave() {
	f := p.flight
	f.hub.mu.Lock() // it may not have begun
	defer f.hub.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leave(p)
}

// leave takes a member out. The lock is held.
func (f *flight) leave(p *passenger) {
	if _, there := f.members[p]; !there {
		return
	}
	delete(f.members, p)
	for end := f.base + len(f.kept); p.at < end; p.at++ {
		f.take(p.at)
	}
	if len(f.members) == 0 {
		f.cancel()
		f.demand.Signal()
	}
}
