package process

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/lifecycle"
)

// The memory limit is the lowest of the cgroup's and its parents', on both versions of cgroups, also in a container.
func TestTheCgroupsMemoryLimit(t *testing.T) {
	const v1, v2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"
	for name, c := range map[string]struct {
		cgroup string
		files  map[string]string
		want   int64
	}{
		"v2": {"0::/a/b\n", map[string]string{v2 + "a/b/memory.max": "1000\n"}, 1000},
		"v2, the parent's": {"0::/a/b\n", map[string]string{v2 + "a/memory.max": "900\n",
			v2 + "a/b/memory.max": "max\n"}, 900},
		"v2 in a container":       {"0::/\n", map[string]string{v2 + "memory.max": "800\n"}, 800},
		"v2, outside of the root": {"0::/../x\n", map[string]string{v2 + "memory.max": "800\n"}, 800},
		"v1": {"9:cpu:/a\n4:memory:/a\n0::/\n", map[string]string{v1 + "a/memory.limit_in_bytes": "700\n",
			v1 + "memory.limit_in_bytes": "9223372036854771712\n"}, 700},
		"v1 in a container": {"4:memory:/docker/x\n", map[string]string{v1 + "memory.limit_in_bytes": "600\n"}, 600},
		"no limit":          {"0::/a\n", map[string]string{v2 + "a/memory.max": "max\n"}, math.MaxInt64},
		"no cgroup":         {"", nil, math.MaxInt64},
		"no number":         {"0::/a\nrubbish\n", map[string]string{v2 + "a/memory.max": "x"}, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			files := map[string]string{"proc/self/cgroup": c.cgroup}
			for f, text := range c.files {
				files[f] = text
			}
			for f, text := range files {
				f = filepath.Join(root, f)
				if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := cgroupLimit(root); got != c.want {
				t.Errorf("it is %d, not %d", got, c.want)
			}
		})
	}
}

// Processes of a cgroup have equal shares of its limit, with a minimum.
func TestMemoryShare(t *testing.T) {
	t.Setenv("GOMEMLIMIT", "")
	for _, c := range []struct {
		limit int64
		n     int
		want  string
	}{{10 << 30, 9, "1073741824"}, {1 << 30, 12, "268435456"}, {math.MaxInt64, 12, ""}} {
		if got := memoryShare(c.limit, c.n); got != c.want {
			t.Errorf("%d bytes for %d: %q, want %q", c.limit, c.n, got, c.want)
		}
	}
	t.Setenv("GOMEMLIMIT", "1GiB")
	if got := memoryShare(1<<30, 12); got != "" {
		t.Errorf("GOMEMLIMIT is replaced by %q", got)
	}
}

// GOMEMLIMIT has precedence over the cgroup.
func TestGOMEMLIMITHasPrecedence(t *testing.T) {
	before := debug.SetMemoryLimit(12345 << 20)
	defer debug.SetMemoryLimit(before)
	t.Setenv("GOMEMLIMIT", "12345MiB")
	if LimitMemory(); debug.SetMemoryLimit(-1) != 12345<<20 {
		t.Errorf("the limit is %d", debug.SetMemoryLimit(-1))
	}
}

// The heap grows less between two collections only if all services of a process allow it, and GOGC has precedence.
func TestGCPercent(t *testing.T) {
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	cached, other := &Module{GCPercent: 50}, &Module{}
	for name, c := range map[string]struct {
		modules Modules
		env     string
		want    int
	}{
		"a cache":      {Modules{cached}, "", 50},
		"beside other": {Modules{cached, other}, "", 100},
		"other":        {Modules{other}, "", 100},
		"GOGC":         {Modules{cached}, "100", 100},
	} {
		t.Setenv("GOGC", c.env)
		debug.SetGCPercent(100)
		(&Process{modules: c.modules}).setGCPercent()
		if got := debug.SetGCPercent(100); got != c.want {
			t.Errorf("%s: it is %d, not %d", name, got, c.want)
		}
	}
}

// A process at rest returns unused memory. A busy process keeps it, and so does a process with little unused memory.
func TestAProcessAtRestReleasesMemory(t *testing.T) {
	before := heap{}
	enough := heap{allocated: restBytes, live: 80 << 20, unused: releaseBytes + 10<<20}
	if after := release(before, enough); after == enough {
		t.Error("a process at rest releases no memory")
	}
	for name, change := range map[string]func(*heap){
		"busy":     func(h *heap) { h.allocated += h.live/liveShare + 1 },
		"small":    func(h *heap) { h.unused-- },
		"GOGC=off": func(h *heap) { h.collectionsOff = true },
	} {
		now := enough
		if change(&now); release(before, now) != now {
			t.Errorf("%s: the process releases memory", name)
		}
	}
}

// The first check is soon after readiness, and only a minute after the start if the process is not ready by then. The
// second is within a minute of it. From then on there is a check each minute.
func TestTheFirstReleaseIsSoonAfterReadiness(t *testing.T) {
	for name, c := range map[string]struct{ readyAfter, from time.Duration }{
		"ready at once":  {0, 0},
		"a slow start":   {20 * time.Second, 20 * time.Second},
		"a longer start": {time.Hour, restPeriod},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ready := &lifecycle.Readiness{}
				if c.readyAfter > 0 {
					ready = lifecycle.NotReady("service")
					time.AfterFunc(c.readyAfter, func() { ready.Set("service", nil) })
				}
				began, checks := time.Now(), []time.Duration{}
				ctx, cancel := context.WithCancel(t.Context())
				releaseAtRest(ctx, ready, func(_, now heap) heap {
					if checks = append(checks, time.Since(began)); len(checks) == 4 {
						cancel()
					}
					return now
				})
				first := checks[0] - c.from
				if first < startPeriod || first >= 2*startPeriod || checks[1]-checks[0] >= restPeriod ||
					checks[2]-checks[1] != restPeriod || checks[3]-checks[2] != restPeriod {
					t.Errorf("the checks are %v after the start", checks)
				}
			})
		})
	}
}
