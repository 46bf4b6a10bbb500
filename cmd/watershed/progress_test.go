package main

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/lifecycle"
)

// TestProgress checks that a runner that is slow to start or to stop prints the reason after a silence, and repeats it.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := lifecycle.NotReady("slow")
		slow.Set("slow", errors.New("etcd does not respond"))
		var out strings.Builder
		runners := []lifecycle.Runner{{Name: "quick"}, {Name: "slow", Ready: slow}}
		show := observe(&progress{w: &out}, runners, func() { out.WriteString("ready\n") })
		show.Starting("quick")
		time.Sleep(time.Millisecond)
		show.Starting("slow")
		time.Sleep(silence + repeatedSilence + time.Second)
		show.Started()
		time.Sleep(2 * repeatedSilence)
		show.Stopping("slow", time.Minute)
		time.Sleep(2 * stopSilence)
		show.Stopping("quick", time.Second)
		const want = "  quick              1 ms\n" +
			"  slow           not ready yet: slow: etcd does not respond\n" +
			"  slow           not ready yet: slow: etcd does not respond\n" +
			"  slow           19000 ms\nready\n" +
			"Waiting for slow to stop, for at most 1m0s. Ctrl-C ends the process at once.\n"
		if out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
}

// TestAFailedStartEndsItsLine checks that an error begins on a line of its own.
func TestAFailedStartEndsItsLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		p := &progress{w: &out}
		show := observe(p, []lifecycle.Runner{{Name: "etcd"}}, nil)
		show.Starting("etcd")
		p.note("kwok ended")
		show.Stopping("etcd", time.Second)
		time.Sleep(2 * silence)
		want := "  etcd           \nkwok ended\n  etcd           \nWaiting for etcd to stop, for at most 1s. Ctrl-C ends the process at once.\n"
		if out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
}
