package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	megabyte = 1e6
	// ceiling is the anonymous memory at which the bench kills a server.
	ceiling = 4000 * megabyte
	// outgrown is the memory growth after which a server is replaced before the next shape.
	outgrown = 50 * megabyte
	// longest limits the requests of one shape.
	longest = 20 * time.Second
	// overtime is the longest wait for work that continues after the clients have left.
	overtime = 30 * time.Second
	// repeats is how often a finding is measured again, at the same fresh server. Requests that fill caches leave heap
	// only the first time; a leak leaves heap each time.
	repeats = 2
	// retainedBytes is the heap growth, beyond the reference's, above which left waits for memory to be freed.
	retainedBytes = 1 * megabyte
)

// usage is the CPU time and the anonymous memory of a server's processes. largest is the memory of the largest process.
type usage struct {
	cpu           time.Duration
	anon, largest int64
}

func (s *subject) usage() (u usage) {
	for _, pid := range s.pids {
		u.cpu += cpuOf(pid)
		anon := anonOf(pid)
		u.anon += anon
		u.largest = max(u.largest, anon)
	}
	return u
}

// cpuOf returns a process's user and system time (proc_pid_stat(5)), in steps of 10 ms.
func cpuOf(pid int) time.Duration {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond
}

// anonOf returns a process's resident anonymous memory in bytes. The resident set also contains pages of the binary,
// which depend on the earlier load.
func anonOf(pid int) int64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("RssAnon:")); ok {
			n, _ := strconv.ParseInt(string(bytes.Fields(rest)[0]), 10, 64)
			return n * 1024
		}
	}
	return 0
}

// result is the cost of one shape at one server.
type result struct {
	Status    string
	Wall, CPU time.Duration
	// Peak and Largest are bytes above the level before the shape: of all processes, and of the largest process.
	Peak, Largest int64
	// Left, Goroutines and Logged remain after the shape: bytes of heap, goroutines, bytes of log.
	Left, Goroutines, Logged int64
	// Gone means that the server died, was killed, or did not respond at the end.
	Gone bool
}

// bench measures shapes at one server after another.
type bench struct {
	t             testing.TB
	settleTimeout time.Duration
	// together makes families share a server.
	together bool
	// idle is a form's CPU time in an idle second, measured at the form's first server.
	idle map[string]time.Duration
	// profiles is the directory for heap and goroutine profiles of findings.
	profiles string
}

// measureAll measures shapes at servers of a form, and adds the costs to all. A finding that may be noise is measured
// again on a fresh server, up to repeats times. It counts only if it recurs each time, and beside a new measurement of
// the reference.
func (b *bench) measureAll(form string, chosen []*shape, all results) {
	var s *subject
	renew := func() {
		if s != nil {
			s.stop()
		}
		s = start(b.t, form, b.idle[form])
		b.idle[form] = s.idle
	}
	defer func() { s.stop() }()
	family := ""
	for _, sh := range chosen {
		if s == nil || sh.family != family && !b.together {
			renew()
		}
		family = sh.family
		var theirs *result
		if form != kubeAPIServer {
			if theirs = all[sh.String()][kubeAPIServer]; theirs == nil {
				b.t.Fatalf("%s was never measured at kube-apiserver", sh)
			}
		}
		r := b.measure(s, sh, theirs)
		isFinding := func(r *result) bool {
			return theirs != nil && slices.ContainsFunc(judge(sh, form, theirs, r), unexplained)
		}
		if isFinding(r) {
			noise := !slices.ContainsFunc(judge(sh, form, theirs, r), certain)
			if noise {
				renew()
				for range repeats {
					again := b.measure(s, sh, theirs)
					r = r.better(again, func(r *result) int { return len(judge(sh, form, theirs, r)) })
					if r.Gone || !isFinding(r) {
						break
					}
				}
			}
			if err := s.profile(b.profiles, sh); err != nil {
				fmt.Printf("no profiles of %s: %v\n", sh, err)
			}
			if noise && isFinding(r) {
				s.stop()
				theirs = b.measureReference(sh, theirs, func(t *result) int { return len(judge(sh, form, t, r)) })
				all.add(sh, kubeAPIServer, theirs)
				s = nil
			}
		}
		all.add(sh, form, r)
		fmt.Printf("%s %-14s %-50s %s\n", time.Now().Format(time.TimeOnly), form, sh, r)
		if s == nil || r.Gone || s.usage().anon > s.fresh+outgrown {
			renew()
		}
	}
}

// measureReference measures a shape at kube-apiserver again, and returns the result with fewer findings. The machine
// may be slower now than at the former measurement.
func (b *bench) measureReference(sh *shape, former *result, findings func(theirs *result) int) *result {
	s := start(b.t, kubeAPIServer, b.idle[kubeAPIServer])
	defer s.stop()
	r := b.measure(s, sh, nil)
	fmt.Printf("%s %-14s %-50s %s (again)\n", time.Now().Format(time.TimeOnly), kubeAPIServer, sh, r)
	if r.Gone {
		return former
	}
	return former.better(r, findings)
}

// better returns the result with fewer findings.
func (r *result) better(other *result, findings func(*result) int) *result {
	if findings(other) < findings(r) {
		return other
	}
	return r
}

func (r *result) String() string {
	return fmt.Sprintf("%-24s %6.2f s, CPU %6.2f s, peak %7.1f MB (%.1f), left %6.1f MB, %d goroutines, %.1f kB of log",
		r.Status, r.Wall.Seconds(), r.CPU.Seconds(), mb(r.Peak), mb(r.Largest), mb(r.Left), r.Goroutines,
		float64(r.Logged)/1000)
}

func mb(n int64) float64 { return float64(n) / megabyte }

// measure sends one shape to a server. theirs is the reference's result, nil at the reference.
func (b *bench) measure(s *subject, sh *shape, theirs *result) *result {
	a := newAttempt(s)
	r := &result{}
	fail := func(when string, err error) *result {
		a.close()
		r.Gone, r.Status = true, strings.TrimSpace(fmt.Sprintf("%s %s: %v", a.statuses(), when, err))
		if s.died() {
			r.Status = strings.TrimSpace(a.statuses() + " died")
		}
		return r
	}
	heap, err := s.heap()
	if err != nil {
		return fail("before", err)
	}
	if sh.setup != nil {
		if err := sh.setup(a); err != nil {
			r = fail("setup", err)
			a.undo()
			return r
		}
		a.rest()
		s.quiet(3 * time.Second)
		if _, err := s.heap(); err != nil { // frees the setup's garbage
			return fail("setup", err)
		}
	}
	routines, err := s.goroutines()
	if err != nil {
		return fail("before", err)
	}
	logged, before := s.logged(), s.usage()
	began := time.Now()
	peak := s.watch()
	ctx, cancel := context.WithTimeout(b.t.Context(), longest)
	sh.run(ctx, a)
	cancel()
	a.close()
	r.Wall = time.Since(began)
	s.quiet(overtime) // for half a second at least
	after, err := s.goroutines()
	if err == nil && after > routines+leftRoutines { // some end after a timeout
		time.Sleep(1500 * time.Millisecond)
		after, err = s.goroutines()
	}
	used := s.usage()
	top, killed := peak()
	if killed || s.died() { // a dead process has no times
		used = top
	}
	r.CPU = max(0, used.cpu-before.cpu-time.Duration(float64(s.idle)*time.Since(began).Seconds()))
	r.Peak, r.Largest = max(0, top.anon-before.anon), max(0, top.largest-before.largest)
	r.Goroutines, r.Logged = after-routines, s.logged()-logged
	r.Status = a.statuses()
	switch {
	case killed:
		r.Gone, r.Status = true, r.Status+fmt.Sprintf(" killed at %d MB", int(ceiling/megabyte))
		return r
	case s.died():
		r.Gone, r.Status = true, r.Status+" died"
		return r
	case err != nil:
		return fail("after", err)
	}
	a.undo()
	if r.Left, err = b.left(s, heap, theirs); err != nil {
		return fail("after", err)
	}
	return r
}

// left returns the growth of the live heap. While the growth is above the threshold, it waits up to settleTimeout.
func (b *bench) left(s *subject, before int64, theirs *result) (int64, error) {
	allowed := int64(retainedBytes)
	if theirs != nil {
		allowed += max(0, theirs.Left)
	}
	for deadline := time.Now().Add(b.settleTimeout); ; time.Sleep(2 * time.Second) {
		heap, err := s.heap()
		if err != nil || heap-before <= allowed || time.Now().After(deadline) {
			return heap - before, err
		}
	}
}

// watch samples the memory until the caller calls stop, which returns the highest sample. It kills a server that
// exceeds the ceiling.
func (s *subject) watch() (stop func() (top usage, killed bool)) {
	var (
		top     usage
		killed  bool
		done    = make(chan struct{})
		sampler sync.WaitGroup
	)
	sampler.Go(func() {
		for {
			u := s.usage()
			top = usage{max(top.cpu, u.cpu), max(top.anon, u.anon), max(top.largest, u.largest)}
			if u.anon > ceiling && !killed {
				killed = true
				s.server.Kill()
			}
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return func() (usage, bool) {
		close(done)
		sampler.Wait()
		return top, killed
	}
}
