package storage

import (
	"context"
	"errors"
	"testing"

	"k8s.io/apiserver/pkg/storage/value"

	"watershed.dev/platform/eventlog"
)

// unavailable is a KMS that does not respond.
type unavailable struct{ value.Transformer }

func (unavailable) TransformFromStorage(ctx context.Context, _ []byte, _ value.Context) ([]byte, bool, error) {
	return nil, false, errors.Join(errors.New("the KMS does not respond"), ctx.Err())
}

// A caller that leaves makes no key unavailable for others. A caller whose deadline has passed does: each further call
// of the KMS would take as long.
func TestALeavingCallerLeavesTheKey(t *testing.T) {
	left, leave := context.WithCancel(t.Context())
	leave()
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	st := &Resource{transformer: unavailable{}}
	for name, test := range map[string]struct {
		ctx context.Context
		no  bool
	}{"present": {t.Context(), true}, "left": {left, false}, "late": {late, true}} {
		if _, err := decrypt(test.ctx, st, "key", nil); err == nil || errors.Is(err, eventlog.ErrNoKey) != test.no {
			t.Errorf("%s: %v", name, err)
		}
	}
}
