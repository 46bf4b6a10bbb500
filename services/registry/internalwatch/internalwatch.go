// Package internalwatch implements the InternalWatch contract for authn, authz and admission, which decide by these
// reads. Objects come from etcd. Events come from the registry's own watch cache, which holds events only.
//
// The watch tier must not serve these reads, because a compromised replica could then grant itself any permission. Each
// List and Watch runs in the goroutine of its call.
package internalwatch

import (
	"context"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/list"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	"watershed.dev/platform/watchcache/watch"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/source"
	"watershed.dev/services/registry/storage"
)

const (
	// progressPeriod is how often a watch sends its position, if it has advanced.
	progressPeriod = time.Second
	// localProgressPeriod is the same for the registry's own watches. They do not use their position, but end after
	// this period if the log is stale. Their reflectors wait between two lists, up to 30 s.
	localProgressPeriod = 4 * time.Second
)

// InternalWatch serves the lists and watches.
type InternalWatch struct {
	watchfanoutv1.UnimplementedInternalWatchServer
	objects   *objects
	converter *conversion.Converter
	watches   *watch.Server
	local     *watch.Server
	// listSlots maps a resource to the chan struct{} that is the slot of its lists. A list holds a whole resource in
	// memory. Large lists of a resource do not delay the lists of others, by which services authorize.
	listSlots sync.Map
}

// New returns a server of the resources of an etcd. Its watches read events from c, which l fills. They begin after
// awaitEpoch (watch.Options); nil: at once.
func New(r *lookup.Resources, s *source.Source, etcd *storage.Etcd, c *cache.Cache, l *logreader.Reader,
	awaitEpoch func(context.Context) error) *InternalWatch {
	p := &InternalWatch{
		objects:   &objects{r, etcd},
		converter: conversion.New(s.Encode, c, 0),
	}
	options := watch.Options{
		Objects:        p.objects,
		Cache:          c,
		LogReader:      l,
		Converter:      p.converter,
		ProgressPeriod: progressPeriod,
		OnlyAdvances:   true,
		AwaitEpoch:     awaitEpoch,
	}
	p.watches = watch.New(options)
	options.ServesStale, options.ProgressPeriod = true, localProgressPeriod
	p.local = watch.New(options)
	return p
}

// Local returns the server of the registry's own watches. While the log stalls, their informers list from etcd.
func (p *InternalWatch) Local() *watch.Server { return p.local }

// Watch streams events of the watch cache. If the cache no longer holds the next event, the watch ends with 410 and the
// client lists.
func (p *InternalWatch) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return p.watches.Watch(r, stream)
}

// List sends a whole list as etcd has it.
func (p *InternalWatch) List(
	r *watchfanoutv1.ListRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk],
) error {
	limited := r.Limit != 0 && r.ResourceVersion != "0" // resourceVersion "0" makes the limit void
	if limited || r.Continue != "" || r.ResourceVersionMatch == "Exact" {
		return rpc.ErrDelegate
	}
	var start events.Start
	if r.ResourceVersion != "" {
		var err error
		if start.At.Revision, err = strconv.ParseInt(r.ResourceVersion, 10, 64); err != nil {
			return rpc.ErrDelegate // the delegate returns the API's error
		}
	}
	ctx := stream.Context()
	q, err := p.objects.Resolve(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	body, err := p.read(ctx, q, start)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return list.Send(body, stream)
}

// read reads a list. Its slot is free again before the list is sent, because the client may be frozen.
func (p *InternalWatch) read(ctx context.Context, q *query.Query, start events.Start) (*frame.Body, error) {
	// A list of a single object does not wait for a slot: authn, authz and admission measure their freshness with it.
	if _, single := q.ExactName(); !single {
		slot, _ := p.listSlots.LoadOrStore(q.Entry.StorageResource, make(chan struct{}, 1))
		select {
		case slot.(chan struct{}) <- struct{}{}:
			defer func() { <-slot.(chan struct{}) }()
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	items, revision, err := p.objects.Select(ctx, q, start)
	if err == nil && !conversion.AllNative(q, items) {
		err = rpc.ErrDelegate
	}
	if err != nil {
		return nil, err
	}
	return list.Body(ctx, p.converter, q, &list.Page{Items: items, Revision: revision})
}
