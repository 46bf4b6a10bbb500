package watch

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
)

// An owner may have as many bytes in flight as are free, and always one message. Its messages are sent in order of
// arrival.
func TestBytesInFlightAreBoundedByOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newInflightQuota(100)
		var mu sync.Mutex
		var sent []int
		var releases []func()
		for i := range 10 {
			go func() {
				release := f.acquire(t.Context(), nil, "loud", 20)
				mu.Lock()
				defer mu.Unlock()
				sent, releases = append(sent, i), append(releases, release)
			}()
			synctest.Wait()
		}
		if len(sent) != 3 || f.used != 60 { // 20+20 of 80 free, 40+20 of 60 free; 60+20 exceeds 40
			t.Fatalf("%d messages, %d bytes are in flight", len(sent), f.used)
		}
		quiet := f.acquire(t.Context(), nil, "quiet", 20)
		large := f.acquire(t.Context(), nil, "large", 1000) // one message is always granted
		f.acquire(t.Context(), nil, "", 1<<40)()
		quiet()
		quiet() // a second release has no effect
		large()
		if f.used != 60 || len(f.owners) != 1 {
			t.Errorf("%d bytes of %d owners are in flight", f.used, len(f.owners))
		}
		for i := range 10 {
			releases[i]()
			synctest.Wait()
		}
		for i, n := range sent {
			if i != n {
				t.Errorf("they were sent as %v", sent)
				break
			}
		}
		if f.used != 0 || len(f.owners) != 0 {
			t.Errorf("%d bytes of %d owners stay", f.used, len(f.owners))
		}
	})
}

// A message that fits is sent when the stream of the larger message before it ends.
func TestAnEndedStreamDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newInflightQuota(100)
		held := f.acquire(t.Context(), nil, "o", 40)
		ctx, cancel := context.WithCancel(t.Context())
		go f.acquire(ctx, nil, "o", 30)
		synctest.Wait()
		var sent func()
		go func() { sent = f.acquire(t.Context(), nil, "o", 10) }()
		synctest.Wait()
		if sent != nil {
			t.Fatal("a message overtakes another")
		}
		cancel()
		synctest.Wait()
		if sent == nil {
			t.Fatal("the message waits although it fits")
		}
		sent()
		held()
		if f.used != 0 || len(f.owners) != 0 {
			t.Errorf("%d bytes of %d owners stay", f.used, len(f.owners))
		}
	})
}

// A message whose stream has ended leaves the queue, or releases its bytes.
func TestAnEndedStreamWaitsForNoBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newInflightQuota(10)
		first := f.acquire(t.Context(), nil, "o", 10)
		ctx, cancel := context.WithCancel(t.Context())
		stop := make(chan struct{})
		var ended sync.WaitGroup
		ended.Go(func() {
			if f.acquire(ctx, nil, "o", 10) != nil {
				t.Error("acquire granted the bytes")
			}
		})
		ended.Go(func() {
			if f.acquire(t.Context(), stop, "o", 10) != nil {
				t.Error("acquire granted the bytes")
			}
		})
		synctest.Wait()
		cancel()
		close(stop)
		ended.Wait()
		first()
		if f.used != 0 || len(f.owners) != 0 {
			t.Errorf("%d bytes of %d owners stay", f.used, len(f.owners))
		}
	})
}
