package log

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// keyTimeout bounds one question for a key.
	keyTimeout = 5 * time.Second
	// refusedFor is for how long a key that is not to be had is not asked for again.
	refusedFor = 10 * time.Second
	// heldKeys bounds how many keys are held in memory.
	heldKeys = 1000
)

// keys are those that registry has told of, by name.
type keys struct {
	source registryv1.SourceClient

	mu   sync.Mutex
	told map[string]told
}

type told struct {
	secret []byte
	err    error
	at     time.Time
}

// get implements eventlog.Keys.
func (k *keys) get(ctx context.Context, storedAs, key string) ([]byte, error) {
	name := storedAs + "/" + key
	k.mu.Lock()
	t, ok := k.told[name]
	k.mu.Unlock()
	if ok && (t.err == nil || time.Since(t.at) < refusedFor) {
		return t.secret, t.err
	}
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	resp, err := k.source.LogKey(ctx, &registryv1.LogKeyRequest{StoredAs: storedAs, Key: key})
	switch status.Code(err) {
	case codes.OK, codes.NotFound, codes.FailedPrecondition:
	default:
		return nil, err
	}
	t = told{secret: resp.GetSecret(), at: time.Now()}
	if err != nil {
		t.err = fmt.Errorf("%w: %w", eventlog.ErrNoKey, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.told == nil || len(k.told) >= heldKeys {
		k.told = map[string]told{}
	}
	k.told[name] = t
	return t.secret, t.err
}
