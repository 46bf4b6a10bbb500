package process

import (
	"bytes"
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"

	"watershed.dev/platform/lifecycle"
)

// unlimited is the least limit that means no limit. cgroup v1 has a number near the maximum of int64 for it.
const unlimited = 1 << 60

// defaultGCPercent is Go's default.
const defaultGCPercent = 100

// LimitMemory sets the memory limit of the Go runtime to nine tenths of the cgroup's. The garbage collector then runs
// before the kernel ends the process. The limit is soft. GOMEMLIMIT, if set, has precedence.
func LimitMemory() {
	if os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	if limit := cgroupLimit("/"); limit < unlimited {
		debug.SetMemoryLimit(limit / 10 * 9)
	}
}

// minMemoryShare is the least share of a process. With less, the garbage collector of a small process would run too
// often.
const minMemoryShare = 256 << 20

// MemoryShare returns the GOMEMLIMIT of each of n processes in this process's cgroup: equal shares of the limit of
// LimitMemory. It is empty if the cgroup has no limit, or if GOMEMLIMIT is set.
func MemoryShare(n int) string { return memoryShare(cgroupLimit("/"), n) }

func memoryShare(limit int64, n int) string {
	if os.Getenv("GOMEMLIMIT") != "" || limit >= unlimited {
		return ""
	}
	return strconv.FormatInt(max(limit/10*9/int64(n), minMemoryShare), 10)
}

// setGCPercent sets how much the heap may grow between two garbage collections, in percent. It is the
// maximum of the services' values. GOGC, if set, has precedence.
func (p *Process) setGCPercent() {
	percent := 0
	for _, m := range p.modules {
		percent = max(percent, cmp.Or(m.GCPercent, defaultGCPercent))
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

const (
	// restPeriod is how often a process checks whether it is at rest.
	restPeriod = time.Minute
	// startPeriod is the least time from readiness to the first check.
	startPeriod = 2 * time.Second
	// restBytes is how much a process at rest may allocate in a period. An idle `up` allocates 60 MB in restPeriod.
	restBytes = 128 << 20
	// releaseBytes is the least memory to return to the operating system. An idle authn has 8 MB of live objects, and
	// so about 8 MB to return.
	releaseBytes = 4 << 20
	// Both bounds grow by the live bytes divided by liveShare, because a collection of a large heap costs more.
	liveShare = 8
)

// heap is the state of the Go heap, in bytes.
type heap struct {
	// allocated is the sum of all allocations. live is the size of the objects that the last collection has kept.
	allocated, live uint64
	// unused is about the memory that a collection would free or that is free already.
	unused uint64
	// collectionsOff is true with GOGC=off.
	collectionsOff bool
}

func readHeap() heap {
	samples := []metrics.Sample{
		{Name: "/gc/heap/allocs:bytes"},
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/free:bytes"}, // without the released memory
		{Name: "/gc/gogc:percent"},
	}
	metrics.Read(samples)
	of := func(i int) uint64 { return samples[i].Value.Uint64() }
	return heap{
		allocated:      of(0),
		live:           of(1),
		unused:         of(2) - min(of(1), of(2)) + of(3),
		collectionsOff: of(4) == math.MaxUint64,
	}
}

// ReleaseAtRest returns unused memory to the operating system after each period in which the process was at rest. It
// runs until ctx is done. The Go runtime lets the heap of a process at rest stay as large as it was under load: twice
// the live objects. The first period begins when the process is ready, and is short, because a start leaves garbage.
func ReleaseAtRest(ctx context.Context, ready *lifecycle.Readiness) {
	releaseAtRest(ctx, ready, release)
}

// releaseAtRest calls release after each period. The first two periods are random, because a collection in each
// process at the same time would delay requests.
func releaseAtRest(ctx context.Context, ready *lifecycle.Readiness, release func(before, now heap) heap) {
	starting, cancel := context.WithTimeout(ctx, restPeriod) // a dependency of the process may be down for longer
	_ = ready.Wait(starting)
	cancel()
	period, next := startPeriod+rand.N(startPeriod), rand.N(restPeriod)
	for before := readHeap(); lifecycle.Sleep(ctx, period) == nil; period, next = next, restPeriod {
		before = release(before, readHeap())
	}
}

// release returns unused memory to the operating system if the process was at rest. It returns the state of the heap
// afterwards.
func release(before, now heap) heap {
	share := now.live / liveShare
	if now.allocated-before.allocated > restBytes+share || now.unused < releaseBytes+share || now.collectionsOff {
		return now
	}
	debug.FreeOSMemory()
	return readHeap()
}

// cgroupLimit returns the lowest memory limit in bytes of the process's cgroup and the cgroups above it, of v2 or v1.
// It returns math.MaxInt64 if there is none. root is "/", except in tests.
func cgroupLimit(root string) int64 {
	limit := int64(math.MaxInt64)
	data, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	for line := range bytes.Lines(data) { // ID:CONTROLLERS:PATH (cgroups(7))
		f := strings.SplitN(strings.TrimSpace(string(line)), ":", 3)
		if len(f) < 3 {
			continue
		}
		mount, file := "sys/fs/cgroup", "memory.max"
		switch f[1] {
		case "":
		case "memory":
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container, the mount may have the container's cgroup as its root. The path then does not exist below it.
		for dir := path.Clean("/" + f[2]); ; dir = path.Dir(dir) {
			text, _ := os.ReadFile(filepath.Join(root, mount, dir, file))
			if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
				limit = min(limit, n)
			}
			if dir == "/" {
				break
			}
		}
	}
	return limit
}
