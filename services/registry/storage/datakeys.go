package storage

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
)

const (
	// dataKeysPrefix is where etcd has the keys that messages of the event log are sealed with, by stored resource, each
	// encrypted as the resource's own values are.
	dataKeysPrefix = "/watershed/log-keys/"
	// dataKeyLifetime is how long a key seals: long before its random nonces could meet. dataKeyRetention is how long it is kept after
	// the next one was made, which is longer than the log keeps events.
	dataKeyLifetime  = 24 * time.Hour
	dataKeyRetention = 7 * 24 * time.Hour
)

// encryptedPrefix is what every encrypted value begins with (k8s.io/apiserver/pkg/storage/value).
var encryptedPrefix = []byte("k8s:enc:")

// Encrypted says whether a value of etcd's is encrypted.
func Encrypted(value []byte) bool { return bytes.HasPrefix(value, encryptedPrefix) }

// DataKeys are the keys that messages of the event log are sealed with. Its methods may be called by any number of
// goroutines.
type DataKeys struct {
	storage *Storage

	mu sync.Mutex
	// current are those that this process seals with, by stored resource; read those that it opens with.
	current map[string]dataKey
	cache   eventlog.KeyCache
}

type dataKey struct {
	id        string
	secret    []byte
	createdAt time.Time
	// err is why it could not be had.
	err error
}

// NewDataKeys returns the keys of a storage.
func NewDataKeys(s *Storage) *DataKeys {
	return &DataKeys{storage: s, current: map[string]dataKey{}}
}

// Current is the key to seal events of st with, made and stored where this process has none yet, or an old one.
func (l *DataKeys) Current(ctx context.Context, st *Resource) (id string, secret []byte, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, ok := l.current[st.Name()]
	if age := time.Since(
		k.createdAt,
	); ok &&
		(k.err == nil && age < dataKeyLifetime || k.err != nil && age < eventlog.NegativeTTL) {
		return k.id, k.secret, k.err
	}
	k = dataKey{createdAt: time.Now()}
	k.id, k.secret, k.err = l.create(ctx, st, k.createdAt)
	l.current[st.Name()] = k
	return k.id, k.secret, k.err
}

func (l *DataKeys) create(ctx context.Context, st *Resource, now time.Time) (id string, secret []byte, err error) {
	secret = make([]byte, eventlog.KeyBytes)
	_, _ = rand.Read(secret) // it does not fail
	id = strconv.FormatInt(now.Unix(), 10) + "-" + rand.Text()
	path := dataKeysPrefix + st.Name() + "/" + id
	wrapped, err := st.transformer.TransformToStorage(ctx, secret, authenticatedKey(path))
	if err != nil {
		return "", nil, err
	}
	etcd := l.storage.Client.Client
	if _, err := etcd.Put(ctx, path, string(wrapped)); err != nil {
		return "", nil, err
	}
	return id, secret, l.prune(ctx, st, now)
}

// prune deletes the keys of a resource that nothing in the log is sealed with any more.
func (l *DataKeys) prune(ctx context.Context, st *Resource, now time.Time) error {
	etcd, below := l.storage.Client.Client, dataKeysPrefix+st.Name()+"/"
	all, err := etcd.Get(ctx, below, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	for i := range len(all.Kvs) - 1 { // in the order of their times
		next, _, _ := strings.Cut(strings.TrimPrefix(string(all.Kvs[i+1].Key), below), "-")
		made, err := strconv.ParseInt(next, 10, 64)
		if err == nil && now.Sub(time.Unix(made, 0)) > dataKeyRetention {
			if _, err := etcd.Delete(ctx, string(all.Kvs[i].Key)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Get is the key of an id, as whoever sealed with it stored it. An error of eventlog.ErrNoKey is final for a while.
func (l *DataKeys) Get(ctx context.Context, st *Resource, id string) ([]byte, error) {
	path := dataKeysPrefix + st.Name() + "/" + id
	return l.cache.Get(path, func() ([]byte, error) {
		resp, err := l.storage.Client.Client.Get(ctx, path)
		if err != nil {
			return nil, err // etcd's, which may go away
		}
		if len(resp.Kvs) == 0 {
			return nil, fmt.Errorf("%w: etcd has none of the name %s", eventlog.ErrNoKey, id)
		}
		secret, _, err := st.transformer.TransformFromStorage(ctx, resp.Kvs[0].Value, authenticatedKey(path))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", eventlog.ErrNoKey, err)
		}
		return secret, nil
	})
}
