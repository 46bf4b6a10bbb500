package main

import (
	"context"
	"time"
)

// received records that a watch has received a revision.
func (w *workload) received(revision int64) {
	for {
		last := w.delivered.Load()
		if last >= revision || w.delivered.CompareAndSwap(last, revision) {
			return
		}
	}
}

// compact compacts etcd. The fault compactEtcd compacts at most the latest revision that a watch has received, which
// the log has. The fault compactPastLog compacts at etcd's last change.
func (w *workload) compact(f fault) {
	revision := w.truth.reached() // the checker itself needs the revisions after it
	if f.kind == compactEtcd {
		revision = min(revision, w.delivered.Load()-int64(f.target))
	}
	w.compactAt(revision)
}

func (w *workload) compactAt(revision int64) {
	if revision <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := w.truth.client.Compact(ctx, revision); err == nil { // etcd may be without a leader
		w.compactions.Add(1)
	}
}
