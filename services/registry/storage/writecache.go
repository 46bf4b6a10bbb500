package storage

import (
	"context"
	"strings"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"watershed.dev/platform/lru"
)

const (
	// writeCacheBytes bounds the values that are kept, and maxValueBytes one of them.
	writeCacheBytes = 16 << 20
	maxValueBytes   = 256 << 10
)

// writeCache are the values that this registry has last written, as etcd has them. An update begins with what is kept, and
// spares the read of what exists: it is one transaction, which etcd refuses where the value has changed since, and
// answers with the one that it has (k8s.io/apiserver/pkg/storage, cachedExistingObject; kube-apiserver passes its watch
// cache's object). What is kept may be old, and is never answered to anybody.
type writeCache struct {
	byKey *lru.Cache[string, cachedValue]
}

// cachedValue is one value, and the revision that it was written at.
type cachedValue struct {
	data     []byte
	revision int64
}

func newWriteCache() *writeCache { return &writeCache{lru.New[string, cachedValue](writeCacheBytes)} }

func (r *writeCache) get(key string) (data []byte, revision int64) {
	w, _ := r.byKey.Get(key)
	return w.data, w.revision
}

// put keeps a value, unless a later one is kept. data is not changed from here on.
func (r *writeCache) put(key string, data []byte, revision int64) {
	later := func(w cachedValue) bool { return w.revision > revision }
	if len(data) > maxValueBytes {
		r.byKey.RemoveIf(key, func(w cachedValue) bool { return !later(w) })
		return
	}
	r.byKey.PutUnless(key, later, cachedValue{data, revision}, len(key)+len(data))
}

// remove forgets a value that was written before a revision.
func (r *writeCache) remove(key string, before int64) {
	r.byKey.RemoveIf(key, func(w cachedValue) bool { return w.revision < before })
}

// cachingClient is etcd's client as upstream's storage uses it, with what it writes kept, and known of what is encrypted.
type cachingClient struct {
	etcdkubernetes.Interface
	storage *Storage
}

// Get implements etcd's client.
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

// OptimisticPut implements etcd's client.
func (r *cachingClient) OptimisticPut(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (etcdkubernetes.PutResponse, error) {
	resp, err := r.Interface.OptimisticPut(ctx, key, value, expected, opts)
	if err == nil && resp.Succeeded {
		r.storage.writeCache.put(key, value, resp.Revision)
	}
	return resp, err
}

// OptimisticDelete implements etcd's client.
func (r *cachingClient) OptimisticDelete(ctx context.Context, key string, expected int64,
	opts etcdkubernetes.DeleteOptions) (etcdkubernetes.DeleteResponse, error) {
	resp, err := r.Interface.OptimisticDelete(ctx, key, expected, opts)
	if err == nil && resp.Succeeded {
		r.storage.writeCache.remove(key, resp.Revision)
	}
	return resp, err
}

// cachedStore is a store whose updates and deletions begin with what was last written, where that is kept.
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

// cachedExistingObject is what was last written at key; nil where that is not known.
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
