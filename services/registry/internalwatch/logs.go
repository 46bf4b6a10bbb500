package internalwatch

import (
	"context"

	"google.golang.org/grpc"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/watch"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/lookup"
)

// Logs serves each resource with the server of the resource's event log.
type Logs struct {
	watchfanoutv1.UnimplementedInternalWatchServer
	Resources *lookup.Resources
	// ByLog has a server for each event log. It must not change after the first call.
	ByLog map[eventlog.LogID]*InternalWatch
}

// of returns the server of a resource. The server of the main log rejects a resource that is not served.
func (l *Logs) of(ctx context.Context, r *commonv1.Resource) *InternalWatch {
	if scope, err := l.Resources.RequestScope(ctx, r); err == nil {
		return l.ByLog[eventlog.LogID(scope.APIResource.Log)]
	}
	return l.ByLog[eventlog.Main]
}

// Watch implements watchfanoutv1.InternalWatchServer.
func (l *Logs) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return l.of(stream.Context(), r.GetQuery().GetResource()).Watch(r, stream)
}

// List implements watchfanoutv1.InternalWatchServer.
func (l *Logs) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	return l.of(stream.Context(), r.GetQuery().GetResource()).List(r, stream)
}

// Local returns the server of the registry's own watches.
func (l *Logs) Local() LocalWatches { return LocalWatches{l} }

// LocalWatches serves the registry's own watches.
type LocalWatches struct{ logs *Logs }

// Watch streams the frames of a watch.
func (l LocalWatches) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return l.server(stream.Context(), r).Watch(r, stream)
}

func (l LocalWatches) server(ctx context.Context, r *watchfanoutv1.WatchRequest) *watch.Server {
	return l.logs.of(ctx, r.GetQuery().GetResource()).Local()
}
