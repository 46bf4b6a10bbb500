package storage

import (
	"context"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"watershed.dev/platform/lru"
)

const (
	// writeCacheBytes bounds all cached values, and maxValueBytes each of them.
	writeCacheBytes = 16 << 20
	maxValueBytes   = 256 << 10
)

// writeCache caches the values that this registry wrote last, as etcd stores them. An update starts from the cached
// value and so saves the read of the existing object.
//
// The update is a transaction that fails if the value has changed, and then returns the current value. kube-apiserver
// does the same with the object of its watch cache (cachedExistingObject in k8s.io/apiserver/pkg/storage). A cached
// value may be old, so it is never returned to a client.
type writeCache struct {
	byKey *lru.Cache[string, cachedValue]
}

// cachedValue is an etcd value and its mod revision.
type cachedValue struct {
	data     []byte
	revision int64
}

func newWriteCache() *writeCache { return &writeCache{lru.New[string, cachedValue](writeCacheBytes)} }

func (r *writeCache) get(key string) (data []byte, revision int64) {
	w, _ := r.byKey.Get(key)
	return w.data, w.revision
}

// put caches a value, unless a later revision is cached. The caller must not change data afterwards.
func (r *writeCache) put(key string, data []byte, revision int64) {
	later := func(w cachedValue) bool { return w.revision > revision }
	if len(data) > maxValueBytes {
		r.byKey.RemoveIf(key, func(w cachedValue) bool { return !later(w) })
		return
	}
	r.byKey.PutUnless(key, later, cachedValue{data, revision}, len(key)+len(data))
}

// remove drops a value whose revision is less than before.
func (r *writeCache) remove(key string, before int64) {
	r.byKey.RemoveIf(key, func(w cachedValue) bool { return w.revision < before })
}

// cachingClient is the etcd client of upstream's storage. It caches written values and records which resources have
// encrypted values.
type cachingClient struct {
	etcdkubernetes.Interface
	kv      clientv3.KV
	storage *Storage
}

// Get implements kubernetes.Interface of etcd's client.
func (r *cachingClient) Get(ctx context.Context, key string,
	opts etcdkubernetes.GetOptions) (etcdkubernetes.GetResponse, error) {
	resp, err := r.Interface.Get(ctx, key, opts)
	if err == nil && resp.KV != nil && r.storage.encryption.transformers != nil {
		if st, ok := r.storage.ByKey(key); ok {
			st.noteEncryption(resp.KV.Value)
		}
	}
	return resp, err
}

// OptimisticPut implements kubernetes.Interface of etcd's client.
func (r *cachingClient) OptimisticPut(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (etcdkubernetes.PutResponse, error) {
	resp, err := r.put(ctx, key, value, expected, opts)
	if err == nil && resp.Succeeded {
		r.storage.writeCache.put(key, value, resp.Revision)
	}
	return resp, err
}

// OptimisticDelete implements kubernetes.Interface of etcd's client.
func (r *cachingClient) OptimisticDelete(ctx context.Context, key string, expected int64,
	opts etcdkubernetes.DeleteOptions) (etcdkubernetes.DeleteResponse, error) {
	resp, err := r.Interface.OptimisticDelete(ctx, key, expected, opts)
	if err == nil && resp.Succeeded {
		r.storage.writeCache.remove(key, resp.Revision)
		if d, ok := ctx.Value(definitionKey{}).(*Definition); ok { // an update that removed the last finalizer
			d.decided.Store(true)
		}
	}
	return resp, err
}

// cachedStore is a store whose updates and deletes start from the write cache.
type cachedStore struct {
	apistorage.Interface
	writeCache *writeCache
	prefix     string
	newFunc    func() runtime.Object
	decoder    interface {
		Decode([]byte, runtime.Object, int64) error
	}
	transformer value.Transformer
}

// cachedExistingObject returns the object that this registry last wrote at key, or nil.
func (b *cachedStore) cachedExistingObject(ctx context.Context, key string) runtime.Object {
	key = b.prefix + strings.TrimPrefix(key, "/")
	data, revision := b.writeCache.get(key)
	if data == nil {
		return nil
	}
	plain, _, err := b.transformer.TransformFromStorage(ctx, data, authenticatedKey(key))
	if err != nil {
		return nil
	}
	obj := b.newFunc()
	if b.decoder.Decode(plain, obj, revision) != nil {
		return nil
	}
	return obj
}

// GuaranteedUpdate implements storage.Interface.
func (b *cachedStore) GuaranteedUpdate(ctx context.Context, key string, into runtime.Object, ignoreNotFound bool,
	preconditions *apistorage.Preconditions, try apistorage.UpdateFunc, cached runtime.Object) error {
	if cached == nil {
		cached = b.cachedExistingObject(ctx, key)
	}
	return b.Interface.GuaranteedUpdate(ctx, key, into, ignoreNotFound, preconditions, try, cached)
}

// Delete implements storage.Interface.
func (b *cachedStore) Delete(ctx context.Context, key string, out runtime.Object,
	preconditions *apistorage.Preconditions, validate apistorage.ValidateObjectFunc, cached runtime.Object,
	opts apistorage.DeleteOptions) error {
	if cached == nil && !opts.IgnoreStoreReadError {
		cached = b.cachedExistingObject(ctx, key)
	}
	return b.Interface.Delete(ctx, key, out, preconditions, validate, cached, opts)
}
