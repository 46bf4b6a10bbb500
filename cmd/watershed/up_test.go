package main

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/lifecycle"
)

// TestProgress checks that a runner that is slow to start prints its reason after a silence.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := lifecycle.NotReady("slow")
		slow.Set("slow", errors.New("etcd does not respond"))
		var out strings.Builder
		show := &progressPrinter{w: &out, runners: []lifecycle.Runner{{Name: "quick"}, {Name: "slow", Ready: slow}}}
		show.starting("quick")
		time.Sleep(time.Millisecond)
		show.starting("slow")
		time.Sleep(2 * silence)
		show.end("")
		time.Sleep(2 * silence)
		const want = "  quick            1 ms\n" +
			"  slow         not ready yet: slow: etcd does not respond\n  slow         \n"
		if out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
}
