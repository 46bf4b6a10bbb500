package main

import (
	"fmt"
	"time"
)

// These bounds define a finding. A difference below a floor is noise.
const (
	moreCPU      = 2
	cpuFloor     = 100 * time.Millisecond
	morePeak     = 50 * megabyte
	leftHeap     = 1 * megabyte
	leftRoutines = 5
	moreLog      = 1 * megabyte
)

// finding is one difference in cost between kube-apiserver and a form of Watershed.
type finding struct {
	shape *shape
	form  string
	// kind is status, cpu, peak, left, goroutines or log.
	kind, detail, reason string
}

func (f finding) String() string {
	return fmt.Sprintf("%s: %s: %s: %s", f.form, f.shape, f.kind, f.detail)
}

// certain returns true if a finding cannot be noise. CPU, memory and goroutines vary with other work of the machine.
func certain(f finding) bool { return f.reason == "" && f.kind == "log" }

func unexplained(f finding) bool { return f.reason == "" }

// judge compares a shape's cost at a form of Watershed with kube-apiserver's.
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
	if ours.Gone || theirs.Gone { // a dead server has no memory to compare
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
