package routing

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/responsewriters"
	"watershed.dev/services/gateway/turns"
)

// Lister serves lists from encoded bytes.
type Lister interface {
	List(context.Context, *watchfanoutv1.ListRequest,
		...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.ListChunk], error)
}

// tierTimeout is how long the gateway waits for the watch tier's first chunk before it calls registry. A replica may be
// connected but frozen.
const tierTimeout = 5 * time.Second

// list serves a list from the source in its plan.
func (c *requestContext) list() {
	p, err := c.plan()
	switch {
	case err != nil:
		c.fail(err)
	case p.query == nil:
		c.listFromRegistry()
	default:
		c.listFromSource(p)
	}
}

// listFromSource serves a list from a source, or from registry if the source cannot serve it.
func (c *requestContext) listFromSource(p *plan) {
	turn, ctx := p.source.Watches.Turns.NewTurn(c.req.Context(), identity.Owner(c.user.GetName()))
	defer turn.Yield()
	// The source's work for a long list needs the turn too.
	if turn != nil && c.router.ListSize != nil && c.router.ListSize(c.req) > turns.LongBytes && turn.Take(ctx) != nil {
		c.fail(rpc.FromStatus(status.FromContextError(ctx.Err()).Err()))
		return
	}
	listCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	tierTimer := time.AfterFunc(tierTimeout, cancel)
	// An internal list has no other source. A list of a single object can move to another registry replica if this
	// replica hangs.
	if p.isInternal && !c.singleObject(p.query) {
		tierTimer.Stop()
	}
	stream, err := p.source.Lists.List(
		rpc.WithHashKey(listCtx, c.apiResource.StorageResource),
		&watchfanoutv1.ListRequest{
			Query:                p.query,
			ResourceVersion:      p.opts.ResourceVersion,
			ResourceVersionMatch: string(p.opts.ResourceVersionMatch),
			Limit:                p.opts.Limit,
			Continue:             p.opts.Continue,
			// The audit event contains the response uncompressed.
			Gzip: body.AcceptsGzip(c.req) && !audit.IncludesResponse(ctx),
		},
		grpc.WaitForReady(false),
	)
	var chunk *rpc.Chunk
	if err == nil {
		chunk, err = rpc.ReceiveChunk(stream)
	}
	tierTimer.Stop()
	if err != nil {
		turn.Yield()
		if shouldDelegate(ctx, err) {
			c.listFromRegistry()
		} else {
			c.fail(rpc.FromStatus(err))
		}
		return
	}
	c.recordListSize(chunk.Size, chunk.Gzip)
	if chunk.Size <= turns.LongBytes {
		turn.Yield()
		turn = nil
	}
	write, end := c.startResponse(ctx, chunk)
	for err == nil {
		writeErr := turn.Take(ctx)
		if writeErr == nil {
			writeErr = write(chunk.Data)
		}
		chunk.Free()
		if writeErr != nil { // the client does not read, or the request has ended
			responsewriters.Abort(ctx)
			return
		}
		chunk, err = rpc.ReceiveChunk(stream)
	}
	if !errors.Is(err, io.EOF) {
		panic(http.ErrAbortHandler) // the client must not take half a list for a complete list
	}
	end()
}

// shouldDelegate reports whether registry must serve a list after a source's error. This is so if the source does not
// hold the resource, no replica is available, or gRPC itself could not transport the list.
func shouldDelegate(ctx context.Context, err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.Unavailable, codes.Unimplemented:
		return true
	case codes.Canceled:
		return ctx.Err() == nil // tierTimeout passed
	case codes.ResourceExhausted, codes.Internal:
		return !rpc.HasAPIError(err)
	}
	return false
}

// singleObject reports whether a query selects a single object.
func (c *requestContext) singleObject(q *watchfanoutv1.Query) bool {
	if c.apiResource.Namespaced && q.Namespace == "" {
		return false
	}
	selector, err := fields.ParseSelector(q.FieldSelector)
	if err != nil {
		return false
	}
	_, ok := selector.RequiresExactMatch("metadata.name")
	return ok
}

// listFromRegistry serves a list from registry.
func (c *requestContext) listFromRegistry() {
	data, err := c.readShared(c.getRequest())
	if err != nil {
		c.fail(err)
		return
	}
	c.recordListSize(int64(len(data)), false)
	if owner := identity.QuotaOwner(c.user, c.req.RemoteAddr); owner != "" {
		if !c.router.unread.acquire(owner, data) {
			c.fail(apierrors.NewTooManyRequests("too many lists of the user have not been read, please try again later", 1))
			return
		}
		defer c.router.unread.release(owner, data)
	}
	c.writeResponse(&registryv1.ObjectResponse{Code: http.StatusOK, Body: data})
}

// ListGroups has a group of shared lists for each event log. An etcd that hangs then delays no list of another etcd.
type ListGroups struct {
	newGroup func() *coalesce.Group[[]byte]
	byLog    sync.Map // of *coalesce.Group[[]byte]
}

// NewListGroups returns groups that newGroup makes.
func NewListGroups(newGroup func() *coalesce.Group[[]byte]) *ListGroups {
	return &ListGroups{newGroup: newGroup}
}

func (g *ListGroups) of(log string) *coalesce.Group[[]byte] {
	group, ok := g.byLog.Load(log)
	if !ok {
		group, _ = g.byLog.LoadOrStore(log, g.newGroup())
	}
	return group.(*coalesce.Group[[]byte])
}

// readShared reads a list from registry. Equal requests, which all clients send when the tier is unavailable, share one
// read of etcd. That read starts after the requests arrived. Router.Lists bounds the number of concurrent reads.
func (c *requestContext) readShared(r *registryv1.GetRequest) ([]byte, error) {
	user, query := r.User, r.Query
	values, _ := url.ParseQuery(query)
	r.User, r.Query = nil, listQuery(values) // the list does not depend on the authorized user
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, err
	}
	r.User, r.Query = user, query
	// The read has no context of its own request, because other requests may share it.
	defer telemetry.AddSlowStep(c.req.Context(), registryv1.Objects_List_FullMethodName, time.Now())
	lists := c.router.Lists
	if identity.IsPriority(user) { // their lists do not wait behind other users' lists
		lists = c.router.PriorityLists
	}
	data, err := lists.of(c.apiResource.GetLog()).GetFor(c.req.Context(), identity.Owner(user.GetName()), string(key),
		func(ctx context.Context) ([]byte, error) {
			return c.readList(ctx, r)
		})
	if errors.Is(err, coalesce.ErrBusy) {
		err = apierrors.NewTooManyRequests("too many lists are waiting for etcd, please try again later", 1)
	}
	return data, rpc.FromStatus(err)
}

func (c *requestContext) recordListSize(bytes int64, compressed bool) {
	if c.router.RecordListSize != nil {
		c.router.RecordListSize(c.req, bytes, compressed)
	}
}

// listQuery returns a query with only the parameters that affect a list, in canonical order.
func listQuery(q url.Values) string {
	for k := range q {
		switch k {
		case "labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "resourceVersionMatch",
			"timeoutSeconds", "includeObject", "watch",
			"allowWatchBookmarks", "sendInitialEvents", "shardSelector":
		default:
			delete(q, k)
		}
	}
	return q.Encode()
}

// readList reads a list from a registry replica. If that replica is unresponsive, it also tries another.
func (c *requestContext) readList(ctx context.Context, r *registryv1.GetRequest) ([]byte, error) {
	return rpc.Hedged(rpc.TrackReplica(ctx), rpc.HedgeDelay, func(ctx context.Context) (data []byte, err error) {
		stream, err := c.router.Objects.List(ctx, r)
		if err == nil {
			err = rpc.Each(stream, func(chunk *registryv1.ListChunk) error {
				data = append(data, chunk.Data...)
				return nil
			})
		}
		return data, err
	})
}
