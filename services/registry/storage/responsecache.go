package storage

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// responseCacheBytes bounds the cached responses of all resources, and maxResponseBytes the responses of one object.
const (
	responseCacheBytes = 32 << 20
	maxResponseBytes   = 1 << 20
)

// ResponseCache caches the encoded objects of a single resource. A GET of a cached object reads only its mod revision
// from etcd. If that is unchanged, the GET returns the cached bytes without decoding or encoding, and is linearizable.
//
// The cache skips resources with encrypted objects: a registry that lost the key must not serve them from memory.
type ResponseCache struct {
	resource *Resource
	storage  *Storage
}

// objectKey identifies an object. The etcd key would be ambiguous for invalid names: name "a/b" in namespace "x" and
// name "b" in namespace "x/a" have the same etcd key.
type objectKey struct{ storageResource, namespace, name string }

func (a *ResponseCache) keyOf(namespace, name string) objectKey {
	return objectKey{a.resource.Name(), namespace, name}
}

// cachedResponse is an object at a revision, as JSON and as protobuf. An encoding that no client requested is nil.
type cachedResponse struct {
	revision int64
	bodies   [2][]byte
}

// size returns the approximate memory of a response, in bytes.
func (a *cachedResponse) size() int { return len(a.bodies[0]) + len(a.bodies[1]) + 256 }

// bodyIndex returns the index in bodies of an encoding.
func bodyIndex(protobuf bool) int {
	if protobuf {
		return 1
	}
	return 0
}

var getsTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_gets_total",
	Help: "GETs of single objects in the stored version, from the cache (etcd confirmed the revision) or from etcd.",
}, []string{"from"})

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{getsTotal} }

// ResponseCache returns the cache of a resource's objects in the version that the log carries.
func (s *Storage) ResponseCache(resource *Resource) *ResponseCache {
	return &ResponseCache{resource, s}
}

// Get returns the body of an object at the time of the call or later. The caller must not change it. Nil: the caller
// must read the object.
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

// modRevision reads the mod revision of an object with a linearizable read. It returns 0 if the object does not exist,
// if the read fails, or if the encryption configuration cannot decrypt the value.
func (a *ResponseCache) modRevision(ctx context.Context, namespace, name string) int64 {
	s, key := a.storage, a.resource.Key(namespace, name)
	var options []clientv3.OpOption
	if s.encryption.transformers == nil {
		options = append(options, clientv3.WithKeysOnly())
	}
	etcd := a.resource.Etcd
	before := etcd.latestRevision.Load()
	start := time.Now()
	resp, err := etcd.Client.Client.Get(ctx, key, options...)
	etcdmetrics.RecordEtcdRequest("get", a.resource.GroupResource, err, start)
	if err != nil || len(resp.Kvs) != 1 {
		return 0
	}
	now := resp.Header.Revision
	etcd.latestRevision.CompareAndSwap(before, now)
	if now < before { // etcd is in another epoch, and the log has not delivered it yet
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

// Put caches the body of an object that was read, unless a later revision is cached. The caller must not change the
// body afterwards. Concurrent Puts of two encodings may lose either of them, which costs a read.
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

// invalidate drops a response that is older than an event. The cache never stores the event's object, because an older
// release may have encoded it during a rolling upgrade.
func (a *ResponseCache) invalidate(e *logv1.Event) {
	before := func(cached cachedResponse) bool { return cached.revision < e.Revision }
	a.storage.responses.RemoveIf(a.keyOf(e.Namespace, e.Name), before)
}
