package eventlog

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/lifecycle"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// KeyBytes is the size of a secret that encrypts events.
const KeyBytes = 32

// encryptedThreshold is the size in bytes above which contents are compressed before encryption. The compressed size of
// smaller contents would show NATS which of their parts are equal.
const encryptedThreshold = 64 << 10

// Encrypt encrypts the object and the previous object of an event, so that NATS cannot read them. key names the secret
// to the readers.
func Encrypt(e *logv1.Event, key string, secret []byte) error {
	aead, err := newAEAD(secret)
	if err != nil {
		return err
	}
	data, err := proto.Marshal(&logv1.Contents{Object: e.Object, Previous: e.Previous})
	if err != nil {
		return err
	}
	encrypted := &logv1.Encrypted{Key: key}
	if len(data) > encryptedThreshold {
		if compressed, ok := compress(nil, data); ok {
			data, encrypted.Compressed = compressed, true
		}
	}
	nonce := make([]byte, aead.NonceSize(), aead.NonceSize()+len(data)+aead.Overhead())
	_, _ = rand.Read(nonce) // Read never fails
	encrypted.Data = aead.Seal(nonce, nonce, data, additionalData(e))
	e.Object, e.Previous, e.Encrypted = nil, nil, encrypted
	return nil
}

// decrypt is the inverse of Encrypt.
func decrypt(e *logv1.Event, secret []byte) error {
	aead, err := newAEAD(secret)
	if err != nil {
		return err
	}
	data, n := e.Encrypted.Data, aead.NonceSize()
	if len(data) < n {
		return errors.New("an encrypted event is truncated")
	}
	if data, err = aead.Open(nil, data[:n], data[n:], additionalData(e)); err != nil {
		return err
	}
	if e.Encrypted.Compressed {
		if data, err = decompress(data, maxEventBytes); err != nil {
			return err
		}
	}
	contents := &logv1.Contents{}
	if err := proto.Unmarshal(data, contents); err != nil {
		return err
	}
	e.Object, e.Previous, e.Encrypted = contents.Object, contents.Previous, nil
	return nil
}

func newAEAD(secret []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(secret)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// additionalData binds the ciphertext to its event, so it cannot replace another object's or another event's.
func additionalData(e *logv1.Event) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d\x00%d\x00%d",
		e.StorageResource, e.Namespace, e.Name, e.Revision, e.Index, e.Type)
}

// DataKeyFunc returns the secret of a key that encrypts events of a storage resource. ErrNoKey is final; any other
// error may be temporary.
type DataKeyFunc func(ctx context.Context, storedAs, key string) ([]byte, error)

// ErrNoKey means that no registry can decrypt a key: it is lost, or its KMS is unavailable.
var ErrNoKey = errors.New("the data key is unavailable")

const (
	// NegativeTTL is how long an unavailable key is cached as such. A hanging KMS takes seconds for each call, and the
	// reader of the log waits for it.
	NegativeTTL = 10 * time.Second
	// maxCachedKeys bounds the keys in memory.
	maxCachedKeys = 1000
)

// KeyCache caches keys by name. Any goroutine may call its method.
type KeyCache struct {
	mu     sync.Mutex
	cached map[string]cachedKey
}

type cachedKey struct {
	secret  []byte
	err     error
	fetched time.Time
}

// Get returns a key from the cache, or calls fetch and caches its result. ErrNoKey is cached for NegativeTTL; other
// errors are not cached.
func (c *KeyCache) Get(name string, fetch func() ([]byte, error)) ([]byte, error) {
	c.mu.Lock()
	k, ok := c.cached[name]
	c.mu.Unlock()
	if ok && (k.err == nil || time.Since(k.fetched) < NegativeTTL) {
		return k.secret, k.err
	}
	secret, err := fetch()
	if err != nil && !errors.Is(err, ErrNoKey) {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cached == nil || len(c.cached) >= maxCachedKeys {
		c.cached = map[string]cachedKey{}
	}
	c.cached[name] = cachedKey{secret, err, time.Now()}
	return secret, err
}

// keyRetryPause is the delay before a failed request for a key is repeated.
const keyRetryPause = 200 * time.Millisecond

// WithDecryption returns a function that decrypts events and calls handle with them. An event that cannot be decrypted
// becomes a reset of its resource: the reader must then list the resource from etcd.
func WithDecryption(ctx context.Context, keys DataKeyFunc, handle func(*logv1.Event) error) func(*logv1.Event) error {
	return func(e *logv1.Event) error {
		for e.Encrypted != nil {
			err := decryptWith(ctx, keys, e)
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, ErrNoKey):
				slog.Error("An event cannot be decrypted; its resource is reset", "resource", e.StorageResource,
					"revision", e.Revision, "key", e.Encrypted.Key, "error", err)
				e = &logv1.Event{
					Type:            logv1.Type_TYPE_RESET,
					Revision:        e.Revision,
					Index:           e.Index,
					StorageResource: e.StorageResource,
					More:            e.More,
					Epoch:           e.Epoch,
				}
			case err != nil:
				slog.Warn("The data key of an event is unavailable; retrying", "resource", e.StorageResource,
					"error", err)
				_ = lifecycle.Sleep(ctx, keyRetryPause)
			}
		}
		return handle(e)
	}
}

func decryptWith(ctx context.Context, keys DataKeyFunc, e *logv1.Event) error {
	secret, err := keys(ctx, e.StorageResource, e.Encrypted.Key)
	if err != nil {
		return err
	}
	if err := decrypt(e, secret); err != nil {
		return fmt.Errorf("%w: %w", ErrNoKey, err)
	}
	return nil
}
