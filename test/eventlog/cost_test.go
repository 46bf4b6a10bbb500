package eventlog

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// readers starts n readers, and returns a channel that receives the revision of every event that each reads.
func (c *cluster) readers(n int) chan int64 {
	ctx, cancel := context.WithCancel(context.Background())
	c.t.Cleanup(cancel)
	seen := make(chan int64, 4096)
	for range n {
		go func() {
			_ = eventlog.Main.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
				select {
				case seen <- e.Revision:
				case <-ctx.Done():
				}
				return nil
			})
		}()
	}
	return seen
}

// await waits until n readers have read the revision.
func await(t testing.TB, seen chan int64, n int, revision int64) {
	t.Helper()
	deadline := time.After(time.Minute)
	for n > 0 {
		select {
		case r := <-seen:
			if r == revision {
				n--
			}
		case <-deadline:
			t.Fatalf("%d readers do not read revision %d", n, revision)
		}
	}
}

// cpu returns the CPU time of this process: publisher, server and readers.
func cpu(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkDelivery measures the CPU time of a message of 3 KB from the publisher to two readers, and the delay of a
// message when the log is otherwise idle.
func BenchmarkDelivery(b *testing.B) {
	const messages, delays = 20_000, 500
	for b.Loop() {
		c := start(b)
		data := make([]byte, 3<<10)
		_, _ = rand.Read(data) // random data does not compress
		event := func(revision int64) *logv1.Event {
			e := added(revision, "pods")
			e.Object.Json = data
			return e
		}
		c.write(reset(10))
		seen := c.readers(2)
		await(b, seen, 2, 10)
		w, err := c.writer()
		if err != nil {
			b.Fatal(err)
		}
		began, since := cpu(b), time.Now()
		go func() {
			for r := int64(11); r < 11+messages; r++ {
				if err := w.append(b.Context(), event(r)); err != nil {
					b.Error(err)
					return
				}
			}
		}()
		await(b, seen, 2, 10+messages)
		b.ReportMetric(float64((cpu(b)-began).Microseconds())/messages, "cpu-µs/message")
		b.ReportMetric(float64(messages)/time.Since(since).Seconds(), "messages/s")
		var all []time.Duration
		for r := int64(11 + messages); r < 11+messages+delays; r++ {
			e, since := event(r), time.Now()
			if err := w.append(b.Context(), e); err != nil {
				b.Fatal(err)
			}
			await(b, seen, 2, r)
			all = append(all, time.Since(since))
		}
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds()), "p50-µs")
		b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-µs")
	}
}

// BenchmarkReplay measures a replay of the 1 % of 100,000 messages of 3 KB that are of one resource.
func BenchmarkReplay(b *testing.B) {
	const messages = 100_000
	c := start(b)
	c.write(reset(10))
	w, err := c.writer()
	if err != nil {
		b.Fatal(err)
	}
	data := make([]byte, 3<<10)
	_, _ = rand.Read(data)
	for r := int64(11); r < 11+messages; r++ {
		e := added(r, map[bool]string{true: "nodes", false: "pods"}[r%100 == 0])
		e.Object.Json = data
		if err := w.append(b.Context(), e); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.append(b.Context(), &logv1.Event{Revision: 11 + messages}); err != nil {
		b.Fatal(err)
	}
	if err := w.flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	replay := func() {
		n := 0
		if err := eventlog.Main.Replay(b.Context(), c.stored(), "nodes", 10, "", func(e *logv1.Event) (bool, error) {
			n++
			return e.Revision < 11+messages, nil
		}); err != nil || n != messages/100+1 {
			b.Fatalf("%d events, %v", n, err)
		}
	}
	for b.Loop() {
		began := cpu(b)
		replay()
		b.ReportMetric(float64((cpu(b) - began).Milliseconds()), "cpu-ms/replay")
	}
}

// BenchmarkAppend measures appends of events of 1 KB, alone or 16 in a message. The log stores all of them.
func BenchmarkAppend(b *testing.B) {
	for _, size := range []int{1, 16} {
		b.Run(fmt.Sprintf("batch=%d", size), func(b *testing.B) {
			c := start(b)
			c.write(reset(10))
			w, err := c.writer()
			if err != nil {
				b.Fatal(err)
			}
			data := make([]byte, 1<<10)
			_, _ = rand.Read(data) // random data does not compress
			began, since, revision := cpu(b), time.Now(), int64(10)
			b.ReportAllocs()
			for b.Loop() {
				var batch []*logv1.Event
				for range size {
					revision++
					e := added(revision, "pods")
					e.Object.Json = data
					batch = append(batch, e)
				}
				if err := w.append(b.Context(), batch...); err != nil {
					b.Fatal(err)
				}
			}
			if err := w.flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			appended := float64(revision - 10)
			b.ReportMetric(appended/time.Since(since).Seconds(), "appends/s")
			b.ReportMetric(float64((cpu(b)-began).Nanoseconds())/appended/1000, "cpu-µs/append")
		})
	}
}
