package watch

import (
	"context"

	"google.golang.org/grpc/metadata"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// RouteBy is the metadata by which a caller's balancer chooses replicas of the watch tier: the stored resource.
const RouteBy = "watershed-resource"

// routed sends a call to one of the replicas that hold the query's resource.
func routed(ctx context.Context, q *watchfanoutv1.Query) context.Context {
	return Routed(ctx, q.GetEntry().GetStoredAs())
}

// Routed sends a call to one of the replicas that hold a resource.
func Routed(ctx context.Context, storedAs string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, RouteBy, storedAs)
}
