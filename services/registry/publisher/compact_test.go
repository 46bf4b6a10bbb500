package publisher

import (
	"testing"
	"time"
)

// A revision that the log lacks, or that NATS has not synced, is compacted only if the log has been behind etcd for
// logLostAfter.
func TestCompactionFollowsTheLog(t *testing.T) {
	now := time.Now()
	c := compaction{moved: now}
	for _, step := range []struct {
		about         string
		after         time.Duration
		revision, end int64
		want          int64
	}{
		{"the first interval", 5 * time.Minute, 100, 100, 0},
		{"the log is complete", 5 * time.Minute, 200, 200, 100},
		{"nothing is written for a day", 24 * time.Hour, 200, 200, 200},
		{"the log lags", 5 * time.Minute, 300, 250, 200},
		{"NATS is lost", 5 * time.Minute, 400, 250, 250},
		{"for some time", 20 * time.Minute, 500, 250, 250},
		{"for too long", 10 * time.Minute, 600, 250, 500},
		{"NATS is back, and has not synced", 5 * time.Minute, 700, 600, 250},
		{"the log is complete again", 5 * time.Minute, 800, 800, 600},
		{"a short interval", 10 * time.Second, 900, 900, 600},
		{"before a sync", 100 * time.Second, 1000, 1000, 600},
		{"after a sync", 10 * time.Second, 1100, 1100, 800},
		{"before the next sync", 110 * time.Second, 1200, 1200, 800},
		{"after the next sync", 10 * time.Second, 1300, 1300, 1100},
		{"etcd is restored", 20 * time.Minute, 400, 390, 390},
		{"the log follows it", 20 * time.Minute, 500, 395, 390},
	} {
		now = now.Add(step.after)
		if got := c.next(now, step.revision, step.end); got != step.want {
			t.Errorf("%s: compacted below %d, not %d", step.about, got, step.want)
		}
	}
}
