package storage

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// responseCacheBytes bounds the answers that are kept, of all resources together, and maxResponseBytes one object's.
const (
	responseCacheBytes = 32 << 20
	maxResponseBytes   = 1 << 20
)

// ResponseCache are the objects of one resource as they were last answered. A GET of an object that has not changed since
// asks etcd for its revision alone, and nothing is decoded or encoded; the answer is as fresh as any other. None is
// kept of a resource of which an object was seen encrypted in etcd: who may not decrypt it any more is not to answer
// it.
type ResponseCache struct {
	resource *Resource
	storage  *Storage
}

// objectKey is where an object is. It is not its key in etcd: "a/b" in namespace x, which is no name, and b in x/a, which
// is no namespace, have the same.
type objectKey struct{ storageResource, namespace, name string }

func (a *ResponseCache) keyOf(namespace, name string) objectKey {
	return objectKey{a.resource.Name(), namespace, name}
}

// cachedResponse is one object at a revision: as JSON and as protobuf, or nil where that was not asked for.
type cachedResponse struct {
	revision int64
	bodies   [2][]byte
}

// size is about what an answer takes.
func (a *cachedResponse) size() int { return len(a.bodies[0]) + len(a.bodies[1]) + 256 }

// bodyIndex is which of an answer's bodies has an encoding.
func bodyIndex(protobuf bool) int {
	if protobuf {
		return 1
	}
	return 0
}

var getsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_gets_total",
	Help: "GETs of single objects as they are stored: kept, of an answer that etcd has confirmed, or read from etcd.",
}, []string{"from"})

// Metrics are the storage's own.
func Metrics() []prometheus.Collector { return []prometheus.Collector{getsTotal} }

// ResponseCache are those of a resource's objects in the version that the log carries.
func (s *Storage) ResponseCache(resource *Resource) *ResponseCache {
	return &ResponseCache{resource, s}
}

// Get is an object's body, which must not be changed, as it was when Get began or later; nil: it has to be read.
func (a *ResponseCache) Get(ctx context.Context, namespace, name string, protobuf bool) []byte {
	cached, _ := a.storage.responses.Get(a.keyOf(namespace, name))
	body := cached.bodies[bodyIndex(protobuf)]
	if body != nil && a.modRevision(ctx, namespace, name) == cached.revision && !a.resource.encrypted.Load() {
		getsTotal.WithLabelValues("cache").Inc()
		return body
	}
	getsTotal.WithLabelValues("etcd").Inc()
	return nil
}

// modRevision is that of an object's last change, by a linearizable read; 0 where there is none, nobody can say, or it may
// not be read by what is configured of encryption.
func (a *ResponseCache) modRevision(ctx context.Context, namespace, name string) int64 {
	s, key := a.storage, a.resource.Key(namespace, name)
	var options []clientv3.OpOption
	if s.encryption.transformers == nil {
		options = append(options, clientv3.WithKeysOnly())
	}
	before := s.latestRevision.Load()
	start := time.Now()
	resp, err := s.Client.Client.Get(ctx, key, options...)
	etcdmetrics.RecordEtcdRequest("get", a.resource.GroupResource, err, start)
	if err != nil || len(resp.Kvs) != 1 {
		return 0
	}
	now := resp.Header.Revision
	s.latestRevision.CompareAndSwap(before, now)
	if now < before { // etcd has another history, which the log has not told of yet
		s.ClearCaches()
		return 0
	}
	kv := resp.Kvs[0]
	if s.encryption.transformers != nil {
		a.resource.noteEncryption(kv.Value)
		if _, _, err := a.resource.transformer.TransformFromStorage(ctx, kv.Value, authenticatedKey(key)); err != nil {
			return 0
		}
	}
	return kv.ModRevision
}

// Put keeps the body of an object that was read, which is not changed from here on, unless a later one is kept. Of two
// encodings that are kept at once one may be lost, which costs a reading.
func (a *ResponseCache) Put(namespace, name string, protobuf bool, revision int64, body []byte) {
	p := a.keyOf(namespace, name)
	response := cachedResponse{revision: revision}
	if cached, _ := a.storage.responses.Get(p); cached.revision == revision {
		response = cached
	}
	response.bodies[bodyIndex(protobuf)] = body
	if revision == 0 || a.resource.encrypted.Load() || response.size() > maxResponseBytes {
		return
	}
	later := func(cached cachedResponse) bool { return cached.revision > revision }
	a.storage.responses.PutUnless(p, later, response, response.size())
}

// invalidate is told of an object's change: what was kept is of before. What the event has is not kept in its place: in a
// rolling upgrade it is an older publisher's.
func (a *ResponseCache) invalidate(e *logv1.Event) {
	before := func(cached cachedResponse) bool { return cached.revision < e.Revision }
	a.storage.responses.RemoveIf(a.keyOf(e.Namespace, e.Name), before)
}
