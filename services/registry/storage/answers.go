package storage

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/lru"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// answersBytes bounds the answers that are kept, of all resources together, and answerBytes one object's.
const (
	answersBytes = 32 << 20
	answerBytes  = 1 << 20
)

// Answers are the objects of one resource as they were last answered. A GET of an object that has not changed since
// asks etcd for its revision alone, and nothing is decoded or encoded; the answer is as fresh as any other. What has
// changed is kept as the event log has it, if it was asked for before. Resources that are encrypted in etcd have none:
// who may not decrypt an object any more is not to answer it.
type Answers struct {
	of      *Stored
	storage *Storage
	byKey   *lru.Cache[place, answer]
}

// place is where an object is.
type place struct{ storedAs, namespace, name string }

// answer is one object at a revision: as JSON and as protobuf, or nil where that was not asked for.
type answer struct {
	revision int64
	bodies   [2][]byte
}

func (a *answer) bytes() int { return len(a.bodies[0]) + len(a.bodies[1]) + overhead }

// overhead is about what an answer takes beside its bytes.
const overhead = 256

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
func (s *Storage) Answers(of *Stored) *Answers {
	return &Answers{of: of, storage: s, byKey: s.answers}
}

// Get is an object's body, which must not be changed, as it was when Get began or later; nil: it has to be read.
func (a *Answers) Get(ctx context.Context, namespace, name string, protobuf bool) []byte {
	kept, _ := a.byKey.Get(place{a.of.Name(), namespace, name})
	body := kept.bodies[form(protobuf)]
	if body != nil && a.revision(ctx, namespace, name) == kept.revision && !a.of.hidden.Load() {
		answered.WithLabelValues("kept").Inc()
		return body
	}
	answered.WithLabelValues("read").Inc()
	return nil
}

// revision is that of an object's last change, by a linearizable read; 0 where there is none or nobody can say.
func (a *Answers) revision(ctx context.Context, namespace, name string) int64 {
	options := []clientv3.OpOption{clientv3.WithKeysOnly()}
	if a.storage.encryption.transformers != nil {
		options = nil // whether it is encrypted is told by its value
	}
	begun := time.Now()
	resp, err := a.storage.Client.Client.Get(ctx, a.of.key(namespace, name), options...)
	etcdmetrics.RecordEtcdRequest("get", a.of.GroupResource, err, begun)
	if err != nil || len(resp.Kvs) != 1 {
		return 0
	}
	if Encrypted(resp.Kvs[0].Value) && !a.of.hidden.Swap(true) {
		a.byKey.Clear()
	}
	return resp.Kvs[0].ModRevision
}

// Keep keeps the body of an object that was read, which is not changed from here on, unless a later one is kept.
func (a *Answers) Keep(namespace, name string, protobuf bool, revision int64, body []byte) {
	if len(body) > answerBytes || a.of.hidden.Load() {
		return
	}
	p := place{a.of.Name(), namespace, name}
	one := answer{revision: revision}
	kept, ok := a.byKey.Get(p)
	if ok && kept.revision == revision {
		one = kept
	}
	one.bodies[form(protobuf)] = body
	later := func(kept answer) bool { return kept.revision > revision }
	a.byKey.PutUnless(p, later, one, one.bytes())
}

// changed is told of an object's change: what was asked for before is kept as it is now.
func (a *Answers) changed(e *logv1.Event) {
	a.byKey.Update(place{a.of.Name(), e.Namespace, e.Name}, func(kept answer) (answer, int, bool) {
		if kept.revision >= e.Revision {
			return kept, kept.bytes(), true
		}
		now := answer{revision: e.Revision}
		if e.Type == logv1.Type_TYPE_DELETED || a.of.hidden.Load() || len(e.Object.GetJson()) > answerBytes {
			return now, 0, false
		}
		apiVersion, kind := a.of.Kind.ToAPIVersionAndKind()
		if body := e.Object.GetJson(); kept.bodies[form(false)] != nil && len(body) > 0 {
			framed := make([]byte, 0, len(body)+len(kind)+len(apiVersion)+32)
			now.bodies[form(false)] = append(frame.Object(framed, kind, apiVersion, body), '\n')
		}
		if message := e.Object.GetProtobuf(); kept.bodies[form(true)] != nil && len(message) > 0 {
			now.bodies[form(true)] = frame.Envelope(kind, apiVersion, message)
		}
		return now, now.bytes(), now.bodies[0] != nil || now.bodies[1] != nil
	})
}
