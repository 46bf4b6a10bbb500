package logreader

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// keyTimeout bounds one request for a key.
const keyTimeout = 5 * time.Second

// newDataKeyFunc returns a function that gets a log's data keys from registry, and caches them.
func newDataKeyFunc(source registryv1.SourceClient, log eventlog.LogID) eventlog.DataKeyFunc {
	var cached eventlog.KeyCache
	return func(ctx context.Context, storageResource, key string) ([]byte, error) {
		return cached.Get(storageResource+"/"+key, func() ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, keyTimeout)
			defer cancel()
			resp, err := source.DataKey(ctx, &registryv1.DataKeyRequest{
				StorageResource: storageResource,
				Key:             key,
				Log:             string(log),
			})
			switch status.Code(err) {
			case codes.NotFound, codes.FailedPrecondition:
				return nil, fmt.Errorf("%w: %w", eventlog.ErrNoKey, err)
			}
			return resp.GetSecret(), err
		})
	}
}
