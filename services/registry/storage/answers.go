package storage

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// answersBytes bounds the answers that are kept, of all resources together, and answerBytes one object's.
const (
	answersBytes = 32 << 20
	answerBytes  = 1 << 20
)

// Answers are the objects of one resource as they were last answered. A GET of an object that has not changed since
// asks etcd for its revision alone, and nothing is decoded or encoded; the answer is as fresh as any other. None is
// kept of a resource of which an object was seen encrypted in etcd: who may not decrypt it any more is not to answer
// it.
type Answers struct {
	of      *Stored
	storage *Storage
}

// place is where an object is. It is not its key in etcd: "a/b" in namespace x, which is no name, and b in x/a, which
// is no namespace, have the same.
type place struct{ storedAs, namespace, name string }

func (a *Answers) place(namespace, name string) place { return place{a.of.Name(), namespace, name} }

// answer is one object at a revision: as JSON and as protobuf, or nil where that was not asked for.
type answer struct {
	revision int64
	bodies   [2][]byte
}

// bytes is about what an answer takes.
func (a *answer) bytes() int { return len(a.bodies[0]) + len(a.bodies[1]) + 256 }

// form is which of an answer's bodies has an encoding.
func form(protobuf bool) int {
	if protobuf {
		return 1
	}
	return 0
}

var answered = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_gets_total",
	Help: "GETs of single objects as they are stored: kept, of an answer that etcd has confirmed, or read from etcd.",
}, []string{"from"})

// Metrics are the storage's own.
func Metrics() []prometheus.Collector { return []prometheus.Collector{answered} }

// Answers are those of a resource's objects in the version that the log carries.
func (s *Storage) Answers(of *Stored) *Answers { return &Answers{of, s} }

// Get is an object's body, which must not be changed, as it was when Get began or later; nil: it has to be read.
func (a *Answers) Get(ctx context.Context, namespace, name string, protobuf bool) []byte {
	kept, _ := a.storage.answers.Get(a.place(namespace, name))
	body := kept.bodies[form(protobuf)]
	if body != nil && a.revision(ctx, namespace, name) == kept.revision && !a.of.encrypted.Load() {
		answered.WithLabelValues("kept").Inc()
		return body
	}
	answered.WithLabelValues("read").Inc()
	return nil
}

// revision is that of an object's last change, by a linearizable read; 0 where there is none, nobody can say, or it may
// not be read by what is configured of encryption.
func (a *Answers) revision(ctx context.Context, namespace, name string) int64 {
	s, key := a.storage, a.of.Key(namespace, name)
	var options []clientv3.OpOption
	if s.encryption.transformers == nil {
		options = append(options, clientv3.WithKeysOnly())
	}
	before := s.newest.Load()
	begun := time.Now()
	resp, err := s.Client.Client.Get(ctx, key, options...)
	etcdmetrics.RecordEtcdRequest("get", a.of.GroupResource, err, begun)
	if err != nil || len(resp.Kvs) != 1 {
		return 0
	}
	now := resp.Header.Revision
	s.newest.CompareAndSwap(before, now)
	if now < before { // etcd has another history, which the log has not told of yet
		s.Forget()
		return 0
	}
	kv := resp.Kvs[0]
	if s.encryption.transformers != nil {
		a.of.seen(kv.Value)
		if _, _, err := a.of.transformer.TransformFromStorage(ctx, kv.Value, authenticatedKey(key)); err != nil {
			return 0
		}
	}
	return kv.ModRevision
}

// Keep keeps the body of an object that was read, which is not changed from here on, unless a later one is kept. Of two
// encodings that are kept at once one may be lost, which costs a reading.
func (a *Answers) Keep(namespace, name string, protobuf bool, revision int64, body []byte) {
	p := a.place(namespace, name)
	one := answer{revision: revision}
	if kept, _ := a.storage.answers.Get(p); kept.revision == revision {
		one = kept
	}
	one.bodies[form(protobuf)] = body
	if revision == 0 || a.of.encrypted.Load() || one.bytes() > answerBytes {
		return
	}
	later := func(kept answer) bool { return kept.revision > revision }
	a.storage.answers.PutUnless(p, later, one, one.bytes())
}

// changed is told of an object's change: what was kept is of before. What the event has is not kept in its place: in a
// rolling upgrade it is an older publisher's.
func (a *Answers) changed(e *logv1.Event) {
	before := func(kept answer) bool { return kept.revision < e.Revision }
	a.storage.answers.RemoveIf(a.place(e.Namespace, e.Name), before)
}
