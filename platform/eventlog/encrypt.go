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

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// KeyBytes is how long a secret is that events are sealed with.
const KeyBytes = 32

// Encrypt hides what an event says of its object from NATS. key names the secret to whoever reads it.
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
	if compressed, ok := compress(data); ok {
		data, encrypted.Compressed = compressed, true
	}
	nonce := make([]byte, aead.NonceSize(), aead.NonceSize()+len(data)+aead.Overhead())
	_, _ = rand.Read(nonce) // it does not fail
	encrypted.Data = aead.Seal(nonce, nonce, data, additionalData(e))
	e.Object, e.Previous, e.Encrypted = nil, nil, encrypted
	return nil
}

// Decrypt is Seal's inverse.
func Decrypt(e *logv1.Event, secret []byte) error {
	aead, err := newAEAD(secret)
	if err != nil {
		return err
	}
	data, n := e.Encrypted.Data, aead.NonceSize()
	if len(data) < n {
		return errors.New("a sealed event is cut short")
	}
	if data, err = aead.Open(nil, data[:n], data[n:], additionalData(e)); err != nil {
		return err
	}
	if e.Encrypted.Compressed {
		if data, err = decompress(data); err != nil {
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

// additionalData binds what is sealed to where it is: it cannot be another object's or another event's.
func additionalData(e *logv1.Event) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d\x00%d\x00%d",
		e.StorageResource, e.Namespace, e.Name, e.Revision, e.Index, e.Type)
}

// DataKeyFunc answers the secret of a key that events of a stored resource are sealed with. An error of ErrNoKey is final; any
// other may go away.
type DataKeyFunc func(ctx context.Context, storedAs, key string) ([]byte, error)

// ErrNoKey says that nobody can have a key any more, or as long as a KMS is away.
var ErrNoKey = errors.New("the key is not to be had")

const (
	// NegativeTTL is for how long a key that was not to be had is not asked for again: a KMS that hangs takes seconds
	// each time, and the log waits.
	NegativeTTL = 10 * time.Second
	// maxCachedKeys bounds how many keys are kept in memory.
	maxCachedKeys = 1000
)

// KeyCache keeps keys by name. Its method may be called by any number of goroutines.
type KeyCache struct {
	mu     sync.Mutex
	cached map[string]cachedKey
}

type cachedKey struct {
	secret  []byte
	err     error
	fetched time.Time
}

// Get answers what ask does of a key: that it is not to be had (ErrNoKey) for NegativeTTL. Any other error is not kept.
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

// keyRetryPause is how long to wait until somebody who did not answer is asked for a key again.
const keyRetryPause = 200 * time.Millisecond

// WithDecryption hands events on as they were before they were sealed. One that cannot be opened is a reset of its resource: it
// is to be read anew, from where its objects are.
func WithDecryption(ctx context.Context, keys DataKeyFunc, handle func(*logv1.Event) error) func(*logv1.Event) error {
	return func(e *logv1.Event) error {
		for e.Encrypted != nil {
			err := decryptWith(ctx, keys, e)
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, ErrNoKey):
				slog.Error("An event cannot be opened; its resource is to be read anew", "resource", e.StorageResource,
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
				slog.Warn("A key of the event log cannot be asked for; trying again", "resource", e.StorageResource, "error", err)
				select {
				case <-ctx.Done():
				case <-time.After(keyRetryPause):
				}
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
	if err := Decrypt(e, secret); err != nil {
		return fmt.Errorf("%w: %w", ErrNoKey, err)
	}
	return nil
}
