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
	// logKeys is where etcd has the keys that messages of the event log are sealed with, by stored resource, each
	// encrypted as the resource's own values are.
	logKeys = "/watershed/log-keys/"
	// keyFor is how long a key seals: long before its random nonces could meet. keepKeys is how long it is kept after
	// the next one was made, which is longer than the log keeps events.
	keyFor   = 24 * time.Hour
	keepKeys = 7 * 24 * time.Hour
)

// encryptedPrefix is what every encrypted value begins with (k8s.io/apiserver/pkg/storage/value).
var encryptedPrefix = []byte("k8s:enc:")

// Encrypted says whether a value of etcd's is encrypted.
func Encrypted(value []byte) bool { return bytes.HasPrefix(value, encryptedPrefix) }

// LogKeys are the keys that messages of the event log are sealed with. Its methods may be called by any number of
// goroutines.
type LogKeys struct {
	storage *Storage

	mu sync.Mutex
	// current are those that this process seals with, by stored resource; read those that it opens with.
	current map[string]logKey
	read    eventlog.KeyCache
}

type logKey struct {
	id     string
	secret []byte
	since  time.Time
	// err is why it could not be had.
	err error
}

// NewLogKeys returns the keys of a storage.
func NewLogKeys(s *Storage) *LogKeys {
	return &LogKeys{storage: s, current: map[string]logKey{}}
}

// Current is the key to seal events of st with, made and stored where this process has none yet, or an old one.
func (l *LogKeys) Current(ctx context.Context, st *Stored) (id string, secret []byte, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, ok := l.current[st.Name()]
	if age := time.Since(k.since); ok && (k.err == nil && age < keyFor || k.err != nil && age < eventlog.NegativeTTL) {
		return k.id, k.secret, k.err
	}
	k = logKey{since: time.Now()}
	k.id, k.secret, k.err = l.create(ctx, st, k.since)
	l.current[st.Name()] = k
	return k.id, k.secret, k.err
}

func (l *LogKeys) create(ctx context.Context, st *Stored, now time.Time) (id string, secret []byte, err error) {
	secret = make([]byte, eventlog.KeyBytes)
	_, _ = rand.Read(secret) // it does not fail
	id = strconv.FormatInt(now.Unix(), 10) + "-" + rand.Text()
	path := logKeys + st.Name() + "/" + id
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
func (l *LogKeys) prune(ctx context.Context, st *Stored, now time.Time) error {
	etcd, below := l.storage.Client.Client, logKeys+st.Name()+"/"
	all, err := etcd.Get(ctx, below, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	for i := range len(all.Kvs) - 1 { // in the order of their times
		next, _, _ := strings.Cut(strings.TrimPrefix(string(all.Kvs[i+1].Key), below), "-")
		made, err := strconv.ParseInt(next, 10, 64)
		if err == nil && now.Sub(time.Unix(made, 0)) > keepKeys {
			if _, err := etcd.Delete(ctx, string(all.Kvs[i].Key)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Open is the key of an id, as whoever sealed with it stored it. An error of eventlog.ErrNoKey is final for a while.
func (l *LogKeys) Open(ctx context.Context, st *Stored, id string) ([]byte, error) {
	path := logKeys + st.Name() + "/" + id
	return l.read.Get(path, func() ([]byte, error) {
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
