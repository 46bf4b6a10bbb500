package main

import (
	"fmt"
	"time"
)

// Bounds beyond which a difference is a finding. Below the floors it is noise.
const (
	moreCPU      = 2
	cpuFloor     = 50 * time.Millisecond
	morePeak     = 50 * megabyte
	leftHeap     = 1 * megabyte
	leftRoutines = 5
	moreLog      = 1 * megabyte
)

// finding is one difference in price between kube-apiserver and a form of Watershed.
type finding struct {
	shape *shape
	form  string
	// kind is status, cpu, peak, left, goroutines or log.
	kind, what, reason string
}

func (f finding) String() string {
	return fmt.Sprintf("%s: %s: %s: %s", f.form, f.shape, f.kind, f.what)
}

func unexplained(f finding) bool { return f.reason == "" }

// judge compares the price of a shape at a form of Watershed with kube-apiserver's.
func judge(sh *shape, form string, theirs, ours *result) (found []finding) {
	add := func(kind, format string, args ...any) {
		f := finding{shape: sh, form: form, kind: kind, what: fmt.Sprintf(format, args...)}
		f.reason = reasonOf(f)
		found = append(found, f)
	}
	if theirs.status != ours.status {
		add("status", "%s, kube-apiserver %s", ours.status, theirs.status)
	}
	if ours.cpu > moreCPU*theirs.cpu && ours.cpu > theirs.cpu+cpuFloor {
		add("cpu", "%.2f s, kube-apiserver %.2f s", ours.cpu.Seconds(), theirs.cpu.Seconds())
	}
	if ours.peak > theirs.peak+morePeak {
		add("peak", "%.0f MB, kube-apiserver %.0f MB", mb(ours.peak), mb(theirs.peak))
	}
	if ours.gone || theirs.gone { // nothing is left of a dead server
		return found
	}
	if ours.left > max(0, theirs.left)+leftHeap {
		add("left", "%.1f MB, kube-apiserver %.1f MB", mb(ours.left), mb(theirs.left))
	}
	if ours.goroutines > max(0, theirs.goroutines)+leftRoutines {
		add("goroutines", "%d, kube-apiserver %d", ours.goroutines, theirs.goroutines)
	}
	if ours.logged > theirs.logged+moreLog {
		add("log", "%.1f MB, kube-apiserver %.1f MB", mb(ours.logged), mb(theirs.logged))
	}
	return found
}
