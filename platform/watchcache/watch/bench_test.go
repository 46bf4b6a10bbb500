package watch_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/watch"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// countingStream discards frames and counts their events.
type countingStream struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx    context.Context
	events *sync.WaitGroup
}

func (s *countingStream) Context() context.Context { return s.ctx }

func (s *countingStream) Send(m *watchfanoutv1.WatchFrame) error {
	for range m.Boundaries {
		s.events.Done()
	}
	return nil
}

func (s *countingStream) SendMsg(m any) error {
	tracked := m.(*rpc.TrackedFrame)
	defer tracked.Done()
	return s.Send(tracked.WatchFrame)
}

// BenchmarkDelivery applies events of pods to a cache with 100 watches. An operation is an event at all watches.
func BenchmarkDelivery(b *testing.B) {
	const watches = 100
	w := fixture.New(b)
	s := watch.New(optionsOf(w))
	ctx, cancel := context.WithCancel(b.Context())
	var events, open sync.WaitGroup
	for range watches {
		open.Go(func() {
			_ = s.Watch(&watchfanoutv1.WatchRequest{Query: fixture.Query(), ResourceVersion: "10"},
				&countingStream{ctx: ctx, events: &events})
		})
	}
	for s.Len() < watches {
		time.Sleep(time.Millisecond)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		events.Add(watches)
		w.Apply(logv1.Type_TYPE_MODIFIED, int64(11+i), fmt.Sprint("p", i%100), "node-1", "")
		if i%16 == 0 {
			events.Wait()
		}
	}
	events.Wait()
	b.StopTimer()
	cancel()
	open.Wait()
}
