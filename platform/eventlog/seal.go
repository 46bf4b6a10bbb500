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

// Seal hides what an event says of its object from NATS. key names the secret to whoever reads it.
func Seal(e *logv1.Event, key string, secret []byte) error {
	sealer, err := newSealer(secret)
	if err != nil {
		return err
	}
	data, err := proto.Marshal(&logv1.Contents{Object: e.Object, Previous: e.Previous})
	if err != nil {
		return err
	}
	sealed := &logv1.Encrypted{Key: key}
	if packed, ok := pack(data); ok {
		data, sealed.Compressed = packed, true
	}
	nonce := make([]byte, sealer.NonceSize(), sealer.NonceSize()+len(data)+sealer.Overhead())
	_, _ = rand.Read(nonce) // it does not fail
	sealed.Data = sealer.Seal(nonce, nonce, data, placeOf(e))
	e.Object, e.Previous, e.Encrypted = nil, nil, sealed
	return nil
}

// Open is Seal's inverse.
func Open(e *logv1.Event, secret []byte) error {
	sealer, err := newSealer(secret)
	if err != nil {
		return err
	}
	data, n := e.Encrypted.Data, sealer.NonceSize()
	if len(data) < n {
		return errors.New("a sealed event is cut short")
	}
	if data, err = sealer.Open(nil, data[:n], data[n:], placeOf(e)); err != nil {
		return err
	}
	if e.Encrypted.Compressed {
		if data, err = unpack(data); err != nil {
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

func newSealer(secret []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(secret)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// placeOf binds what is sealed to where it is: it cannot be another object's or another event's.
func placeOf(e *logv1.Event) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s\x00%d\x00%d\x00%d",
		e.StorageResource, e.Namespace, e.Name, e.Revision, e.Index, e.Type)
}

// Keys answers the secret of a key that events of a stored resource are sealed with. An error of ErrNoKey is final; any
// other may go away.
type Keys func(ctx context.Context, storedAs, key string) ([]byte, error)

// ErrNoKey says that nobody can have a key any more, or as long as a KMS is away.
var ErrNoKey = errors.New("the key is not to be had")

const (
	// RefusedFor is for how long a key that was not to be had is not asked for again: a KMS that hangs takes seconds
	// each time, and the log waits.
	RefusedFor = 10 * time.Second
	// heldKeys bounds how many keys are kept in memory.
	heldKeys = 1000
)

// KeyCache keeps keys by name. Its method may be called by any number of goroutines.
type KeyCache struct {
	mu   sync.Mutex
	kept map[string]keptKey
}

type keptKey struct {
	secret []byte
	err    error
	at     time.Time
}

// Get answers what ask does of a key: that it is not to be had (ErrNoKey) for RefusedFor. Any other error is not kept.
func (c *KeyCache) Get(name string, ask func() ([]byte, error)) ([]byte, error) {
	c.mu.Lock()
	k, ok := c.kept[name]
	c.mu.Unlock()
	if ok && (k.err == nil || time.Since(k.at) < RefusedFor) {
		return k.secret, k.err
	}
	secret, err := ask()
	if err != nil && !errors.Is(err, ErrNoKey) {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept == nil || len(c.kept) >= heldKeys {
		c.kept = map[string]keptKey{}
	}
	c.kept[name] = keptKey{secret, err, time.Now()}
	return secret, err
}

// keyPause is how long to wait until somebody who did not answer is asked for a key again.
const keyPause = 200 * time.Millisecond

// Opened hands events on as they were before they were sealed. One that cannot be opened is a reset of its resource: it
// is to be read anew, from where its objects are.
func Opened(ctx context.Context, keys Keys, handle func(*logv1.Event) error) func(*logv1.Event) error {
	return func(e *logv1.Event) error {
		for e.Encrypted != nil {
			err := openWith(ctx, keys, e)
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
				case <-time.After(keyPause):
				}
			}
		}
		return handle(e)
	}
}

func openWith(ctx context.Context, keys Keys, e *logv1.Event) error {
	secret, err := keys(ctx, e.StorageResource, e.Encrypted.Key)
	if err != nil {
		return err
	}
	if err := Open(e, secret); err != nil {
		return fmt.Errorf("%w: %w", ErrNoKey, err)
	}
	return nil
}
