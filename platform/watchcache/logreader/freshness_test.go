package logreader

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/cache"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// ahead is a registry whose etcd has a revision that the log does not deliver.
type ahead struct{ registryv1.SourceClient }

func (ahead) Revision(context.Context, *registryv1.RevisionRequest,
	...grpc.CallOption) (*registryv1.RevisionResponse, error) {
	return &registryv1.RevisionResponse{Revision: 9}, nil
}

// A read of a revision that never arrives fails after 3 s. Reads in the next 10 s fail after 100 ms.
func TestAReadWaits3SecondsForTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(cache.New(1<<20, 0), nil, ahead{}, &lifecycle.Readiness{})
		for _, want := range []time.Duration{3 * time.Second, 100 * time.Millisecond} {
			began := time.Now()
			err := l.WaitUntilConsistent(t.Context())
			if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != want {
				t.Errorf("%v after %v, want %v", err, took, want)
			}
		}
		began := time.Now()
		if err := l.WaitUntilFresh(t.Context(), 9); err == nil || time.Since(began) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}
