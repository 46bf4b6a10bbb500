package storage

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
)

const (
	// dataKeyLifetime is how long a key encrypts: its random nonces must not collide. dataKeyRetention is how long etcd
	// holds a key at least after the next key was made.
	dataKeyLifetime  = 24 * time.Hour
	dataKeyRetention = 7 * 24 * time.Hour
	// storedKeyLifetime is how long a process uses the newest stored key while etcd is full. Then it tries to create a
	// key.
	storedKeyLifetime = time.Minute
)

// encryptedPrefix is the prefix of every encrypted value (k8s.io/apiserver/pkg/storage/value).
var encryptedPrefix = []byte("k8s:enc:")

// Encrypted reports whether an etcd value is encrypted.
func Encrypted(value []byte) bool { return bytes.HasPrefix(value, encryptedPrefix) }

// DataKeys creates and caches the keys that encrypt messages of the event log. Its methods are safe for concurrent use.
type DataKeys struct {
	// prefix is the etcd prefix of the keys, by stored resource, in the etcd of the resource. Each key is encrypted as
	// the resource's values are.
	prefix string
	// logRetention is how long the log holds events.
	logRetention time.Duration

	mu sync.Mutex
	// current holds the keys that this process encrypts with, by stored resource. cache holds the keys that it decrypts
	// with.
	current map[string]dataKey
	cache   eventlog.KeyCache
}

type dataKey struct {
	id        string
	secret    []byte
	createdAt time.Time
	// unconfirmed means that etcd may lack the key.
	unconfirmed bool
	// err is why the key could not be made.
	err error
}

// NewDataKeys returns the data keys in the etcds of s, below the own key prefix. logRetention is how long the log holds
// events.
func NewDataKeys(s *Storage, prefix string, logRetention time.Duration) *DataKeys {
	return &DataKeys{prefix: s.OwnKey(prefix), logRetention: logRetention, current: map[string]dataKey{}}
}

// Unconfirm makes Current read each key from etcd before it encrypts with the key again. The caller calls it when etcd
// may have been restored from an older snapshot, which may lack the key.
func (l *DataKeys) Unconfirm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, k := range l.current {
		k.unconfirmed = k.err == nil
		l.current[name] = k
	}
}

// Current returns the key that encrypts events of st. It creates and stores a key if this process has none, if its key
// is older than dataKeyLifetime, or if etcd lacks its key. If etcd is full, it returns the newest key there. It caches
// an error for eventlog.NegativeTTL, unless ctx has ended.
func (l *DataKeys) Current(ctx context.Context, st *Resource) (id string, secret []byte, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, ok := l.current[st.Name()]
	if ok && time.Since(k.createdAt) < k.lifetime() {
		if k.unconfirmed {
			if ok, err = l.confirm(ctx, st, k); err != nil {
				return "", nil, err
			}
		}
		if ok {
			return k.id, k.secret, k.err
		}
	}
	k = dataKey{createdAt: time.Now()}
	k.id, k.secret, k.err = l.create(ctx, st, k.createdAt)
	if errors.Is(k.err, rpctypes.ErrNoSpace) {
		k.id, k.secret, k.err = l.newest(ctx, st)
		if k.err == nil {
			k.createdAt = k.createdAt.Add(storedKeyLifetime - dataKeyLifetime)
		}
	}
	if k.err == nil || ctx.Err() == nil {
		l.current[st.Name()] = k
	}
	return k.id, k.secret, k.err
}

// lifetime returns how long the key encrypts, or how long its error is cached.
func (k *dataKey) lifetime() time.Duration {
	if k.err != nil {
		return eventlog.NegativeTTL
	}
	return dataKeyLifetime
}

// confirm reports whether etcd has a key. The key stays unconfirmed if it cannot be decrypted now.
func (l *DataKeys) confirm(ctx context.Context, st *Resource, k dataKey) (bool, error) {
	stored, err := l.read(ctx, st, l.prefix+st.Name()+"/"+k.id)
	switch {
	case errors.Is(err, errAbsent):
		return false, nil
	case errors.Is(err, eventlog.ErrNoKey):
		return true, nil
	case err != nil || !bytes.Equal(stored, k.secret):
		return false, err
	}
	k.unconfirmed = false
	l.current[st.Name()] = k
	return true, nil
}

func (l *DataKeys) create(ctx context.Context, st *Resource, now time.Time) (id string, secret []byte, err error) {
	secret = make([]byte, eventlog.KeyBytes)
	_, _ = rand.Read(secret) // rand.Read never returns an error
	id = strconv.FormatInt(now.Unix(), 10) + "-" + rand.Text()
	path := l.prefix + st.Name() + "/" + id
	wrapped, err := st.transformer.TransformToStorage(ctx, secret, authenticatedKey(path))
	if err != nil {
		return "", nil, err
	}
	etcd := st.Etcd.Client.Client
	if _, err := etcd.Put(ctx, path, string(wrapped)); err != nil {
		return "", nil, err
	}
	if err := l.prune(ctx, st, now); err != nil {
		slog.Warn("Old data keys stay in etcd until the next key", "resource", st.Name(), "error", err)
	}
	return id, secret, nil
}

// newest returns the newest key of a resource in etcd, which any registry has made.
func (l *DataKeys) newest(ctx context.Context, st *Resource) (id string, secret []byte, err error) {
	below := l.prefix + st.Name() + "/" // keys are in the order of their times
	last, err := st.Etcd.Client.Client.Get(ctx, below, clientv3.WithLastKey()...)
	if err != nil {
		return "", nil, err
	}
	if len(last.Kvs) == 0 {
		return "", nil, rpctypes.ErrNoSpace
	}
	path := string(last.Kvs[0].Key)
	secret, err = decrypt(ctx, st, path, last.Kvs[0].Value)
	return strings.TrimPrefix(path, below), secret, err
}

// prune deletes the keys of a resource that no event in the log can be encrypted with.
func (l *DataKeys) prune(ctx context.Context, st *Resource, now time.Time) error {
	etcd, below := st.Etcd.Client.Client, l.prefix+st.Name()+"/"
	all, err := etcd.Get(ctx, below, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	retention := max(dataKeyRetention, l.logRetention+dataKeyLifetime)
	for i := range len(all.Kvs) - 1 { // keys are in the order of their times
		next, _, _ := strings.Cut(strings.TrimPrefix(string(all.Kvs[i+1].Key), below), "-")
		made, err := strconv.ParseInt(next, 10, 64)
		if err == nil && now.Sub(time.Unix(made, 0)) > retention {
			if _, err := etcd.Delete(ctx, string(all.Kvs[i].Key)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Get returns the key with an id. An eventlog.ErrNoKey is cached for eventlog.NegativeTTL. Other errors are temporary.
func (l *DataKeys) Get(ctx context.Context, st *Resource, id string) ([]byte, error) {
	name := st.Name() + "/" + id
	return l.cache.Get(name, func() ([]byte, error) {
		secret, err := l.read(ctx, st, l.prefix+name)
		if errors.Is(err, errAbsent) {
			err = fmt.Errorf("%w: etcd has no key %s", eventlog.ErrNoKey, id)
		}
		return secret, err
	})
}

// errAbsent means that etcd lacks a data key.
var errAbsent = errors.New("absent")

// read reads and decrypts the data key at a path.
func (l *DataKeys) read(ctx context.Context, st *Resource, path string) ([]byte, error) {
	resp, err := st.Etcd.Client.Client.Get(ctx, path)
	if err != nil {
		return nil, err // an etcd error is temporary
	}
	if len(resp.Kvs) == 0 {
		return nil, errAbsent
	}
	return decrypt(ctx, st, path, resp.Kvs[0].Value)
}

// decrypt decrypts the data key of a path.
func decrypt(ctx context.Context, st *Resource, path string, value []byte) ([]byte, error) {
	secret, _, err := st.transformer.TransformFromStorage(ctx, value, authenticatedKey(path))
	if err != nil && errors.Is(ctx.Err(), context.Canceled) { // the caller has left; others may have more time
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", eventlog.ErrNoKey, err)
	}
	return secret, nil
}
