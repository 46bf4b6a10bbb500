package main

import (
	"fmt"
	"time"
)

// Bounds beyond which a difference is a finding. Below the floors it is noise.
const (
	moreCPU      = 2
	cpuFloor     = 100 * time.Millisecond
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
	kind, detail, reason string
}

func (f finding) String() string {
	return fmt.Sprintf("%s: %s: %s: %s", f.form, f.shape, f.kind, f.detail)
}

// certain reports whether a finding is no noise: CPU, memory and goroutines vary with what else a machine does.
func certain(f finding) bool { return f.reason == "" && f.kind == "log" }

func unexplained(f finding) bool { return f.reason == "" }

// judge compares the price of a shape at a form of Watershed with kube-apiserver's.
func judge(sh *shape, form string, theirs, ours *result) (found []finding) {
	add := func(kind, format string, args ...any) {
		f := finding{shape: sh, form: form, kind: kind, detail: fmt.Sprintf(format, args...)}
		f.reason = reasonOf(f)
		found = append(found, f)
	}
	if theirs.Status != ours.Status {
		add("status", "%s, kube-apiserver %s", ours.Status, theirs.Status)
	}
	if ours.CPU > moreCPU*theirs.CPU && ours.CPU > theirs.CPU+cpuFloor {
		add("cpu", "%.2f s, kube-apiserver %.2f s", ours.CPU.Seconds(), theirs.CPU.Seconds())
	}
	if ours.Peak > theirs.Peak+morePeak {
		add("peak", "%.0f MB, kube-apiserver %.0f MB", mb(ours.Peak), mb(theirs.Peak))
	}
	if ours.Gone || theirs.Gone { // nothing is left of a dead server
		return found
	}
	if ours.Left > max(0, theirs.Left)+leftHeap {
		add("left", "%.1f MB, kube-apiserver %.1f MB", mb(ours.Left), mb(theirs.Left))
	}
	if ours.Goroutines > max(0, theirs.Goroutines)+leftRoutines {
		add("goroutines", "%d, kube-apiserver %d", ours.Goroutines, theirs.Goroutines)
	}
	if ours.Logged > theirs.Logged+moreLog {
		add("log", "%.1f MB, kube-apiserver %.1f MB", mb(ours.Logged), mb(theirs.Logged))
	}
	return found
}
