package core

import (
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A term decides with any record of etcd and any observed ends. Without the same epoch and the token of the record, it
// begins another epoch.
func FuzzObservedEnds(f *testing.F) {
	f.Add("e", "t", "e", "t", "", int64(9), int64(8), "e", "old", "t", int64(9), int64(9), true)
	f.Add("e", "t", "other", "t", "", int64(9), int64(8), "", "", "", int64(-1), int64(1)<<62, false)
	f.Add("", "", "", "", "", int64(0), int64(0), "", "", "", int64(0), int64(0), true)
	f.Fuzz(func(t *testing.T, epoch, token, epoch1, token1, next1 string, revision1, event1 int64,
		epoch2, token2, next2 string, revision2, event2 int64, hasEvent bool) {
		end := func(epoch, token, next string, revision, event int64) LogEnd {
			return LogEnd{
				Last:     ID{Revision: revision},
				Progress: &logv1.Event{Epoch: epoch, FencingToken: token, NextFencingToken: next},
				Event:    EtcdEvent{Key: "k", Revision: event},
			}
		}
		ends := []LogEnd{end(epoch1, token1, next1, revision1, event1), end(epoch2, token2, next2, revision2, event2)}
		record := Epoch{ID: epoch, Token: token}
		var p Publisher
		term := p.Begin("n-", Epoch{ID: "fresh", Token: "f"}, func(*logv1.Event) (any, error) { return nil, nil })
		term.LogRead(LogEnd{Empty: true})
		term.ObservedEndsRead(record, ends)
		term.EtcdRead(EtcdState{Epoch: record, ModRevision: 3, Revision: 10, HasEvent: hasEvent})
		if term.Request.Op != WriteEpoch {
			t.Fatalf("the term requests %+v", term.Request)
		}
		proves := func(l LogEnd) bool { return l.Progress.Epoch == epoch && l.HasToken(token) }
		if term.Request.Epoch.ID != "fresh" && (epoch == "" || !hasEvent || !proves(ends[0]) && !proves(ends[1])) {
			t.Errorf("the epoch %q continues without a proof", term.Request.Epoch.ID)
		}
		term.Answer(11)
	})
}
