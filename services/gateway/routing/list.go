package routing

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apiserver/pkg/authentication/user"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/deflate"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/responsewriters"
)

// Lister answers lists from encoded bytes.
type Lister interface {
	List(context.Context, *watchfanoutv1.ListRequest,
		...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.ListChunk], error)
}

// tierTimeout is how long the watch tier may be silent before registry is asked in its place: a replica may be there,
// and yet not move.
const tierTimeout = 5 * time.Second

// list answers a list, from who plan says.
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

// listFromSource answers a list from a source, or from registry where the source cannot.
func (c *requestContext) listFromSource(p *plan) {
	ctx := c.req.Context()
	listCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	tierTimer := time.AfterFunc(tierTimeout, cancel)
	// nobody else is to be asked; of one object another registry may be, where this one hangs
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
			// an audit event has the body as it is
			Gzip: deflate.AcceptsGzip(c.req.Header) && !audit.IncludesResponse(ctx),
		},
		grpc.WaitForReady(false),
	)
	var chunk *rpc.Chunk
	if err == nil {
		chunk, err = rpc.ReceiveChunk(stream)
	}
	tierTimer.Stop()
	if err != nil {
		if shouldDelegate(ctx, err) {
			c.listFromRegistry()
		} else {
			c.fail(rpc.FromStatus(err))
		}
		return
	}
	c.recordListSize(chunk.Size, chunk.Gzip)
	write, end := c.startResponse(chunk)
	for err == nil {
		writeErr := write(chunk.Data)
		chunk.Free()
		if writeErr != nil { // the client's matter
			responsewriters.Abort(ctx)
			return
		}
		chunk, err = rpc.ReceiveChunk(stream)
	}
	if !errors.Is(err, io.EOF) {
		panic(http.ErrAbortHandler) // the client must not take half a list for a whole one
	}
	end()
}

// shouldDelegate says whether a source's error means that registry has to be asked: the source does not hold it, nobody is
// there, or gRPC itself could not carry it.
func shouldDelegate(ctx context.Context, err error) bool {
	switch status.Code(err) {
	case codes.FailedPrecondition, codes.Unavailable, codes.Unimplemented:
		return true
	case codes.Canceled:
		return ctx.Err() == nil // it was silent for too long
	case codes.ResourceExhausted, codes.Internal:
		return len(status.Convert(err).Details()) == 0
	}
	return false
}

// singleObject says whether a query is of one object.
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

// listFromRegistry answers a list that the watch tier does not.
func (c *requestContext) listFromRegistry() {
	data, err := c.readShared(c.getRequest())
	if err != nil {
		c.fail(err)
		return
	}
	c.recordListSize(int64(len(data)), false)
	c.writeResponse(&registryv1.ObjectResponse{Code: http.StatusOK, Body: data})
}

// readShared reads a list from registry. Equal requests, as all clients send when the tier is away, share one reading
// of etcd that began after they came. Router.Lists bounds how many readings are under way.
func (c *requestContext) readShared(r *registryv1.GetRequest) ([]byte, error) {
	user, query := r.User, r.Query
	values, _ := url.ParseQuery(query)
	r.User, r.Query = nil, listQuery(values) // a list is the same for each user who may see it
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, err
	}
	r.User, r.Query = user, query
	lists := c.router.Lists
	if slices.ContainsFunc(user.GetGroups(), func(g string) bool { return slices.Contains(priorityGroups, g) }) {
		lists = c.router.PriorityLists
	}
	data, err := lists.GetFor(c.req.Context(), identity.Owner(user.GetName()), string(key),
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

// priorityGroups are the groups whose lists do not wait for everybody's: what decides, what administers, and nodes.
var priorityGroups = []string{identity.ServicesGroup, user.SystemPrivilegedGroup, user.NodesGroup}

// listQuery is a query without what no list depends on, in one order.
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

// readList reads a list from a registry, or from another one where that is silent.
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
