// Package list serves LIST and GET from encoded bytes. It follows kube-apiserver's rules for resourceVersion, limit and
// continue. It returns rpc.ErrDelegate for requests that only registry can serve.
//
// Requests run in their gRPC handlers' goroutines. Server's snapshots are guarded by mu, and runs have locks of their
// own.
package list

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// coldTimeout is how long a list waits for a resource that must be loaded first.
const coldTimeout = 5 * time.Second

// Server serves lists and GETs, and caches the snapshots of paged lists.
type Server struct {
	discovery *discovery.Watcher
	cache     *cache.Cache
	logReader *logreader.Reader
	converter *conversion.Converter
	served    *prometheus.CounterVec
	runs      *runs

	mu        sync.Mutex
	snapshots []pageSnapshot
}

// New returns a server of lists of c's objects. l provides consistent reads, and served resolves queries. compressed
// bounds the cached compressed runs in bytes; 0 disables compression.
func New(served *discovery.Watcher, c *cache.Cache, l *logreader.Reader, converter *conversion.Converter,
	compressed int) *Server {
	return &Server{
		discovery: served,
		cache:     c,
		logReader: l,
		converter: converter,
		served: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_lists_total",
			Help: "Lists served, by stored resource.",
		}, []string{"resource"}),
		runs: newRuns(compressed),
	}
}

// Metrics are this package's collectors.
func (l *Server) Metrics() []prometheus.Collector {
	return []prometheus.Collector{l.served, l.runs.requests, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_watchfanout_compressed_bytes",
		Help: "Bytes of cached compressed runs of list items.",
	}, func() float64 { return float64(l.runs.bytes()) })}
}

// resolve resolves a query. It returns rpc.ErrDelegate for an undiscovered resource, and an error if the replica is
// stale.
func (l *Server) resolve(p *watchfanoutv1.Query) (*query.Query, error) {
	q, err := query.Resolve(l.discovery.View(), p)
	if errors.Is(err, query.ErrNotDiscovered) {
		return nil, rpc.ErrDelegate
	}
	if err != nil {
		return nil, err
	}
	return q, l.logReader.CheckFresh()
}

// List streams the body of a list.
func (l *Server) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	ctx := stream.Context()
	q, err := l.resolve(r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	l.served.WithLabelValues(q.Entry.StorageResource).Inc()
	if q.SelectsConvertedFields() || q.Table && q.Entry.StorageResource == sortedTable {
		return rpc.ErrDelegate
	}
	page, err := l.page(ctx, q, r)
	if err != nil {
		return rpc.ToStatus(err)
	}
	l.cache.Resource(q.Entry.StorageResource).CountList(page.index, page.read, len(page.Items))
	body, err := Body(ctx, l.converter, q, page)
	if err != nil {
		return rpc.ToStatus(err)
	}
	// A converted encoding may change although its items do not, so it is not compressed in runs.
	if r.Gzip && l.runs.limit > 0 && body.Size > deflate.Threshold && (q.Table || conversion.AllNative(q, page.Items)) {
		return l.compressed(stream, &content{encodingKey: q.EncodingKey, items: page.Items, body: body})
	}
	return Send(body, stream)
}

// Body returns the body of a list in q's encoding.
func Body(ctx context.Context, c *conversion.Converter, q *query.Query, p *Page) (*frame.Body, error) {
	items, columns, err := c.Items(ctx, q, p.Items)
	if err != nil {
		return nil, err
	}
	kind, apiVersion := q.ListKind()
	head := &frame.List{
		Kind:         kind,
		APIVersion:   apiVersion,
		Revision:     p.Revision,
		Continue:     p.Continue,
		Remaining:    p.Remaining,
		ShardInfo:    q.ShardInfo(),
		Columns:      columns,
		Unstructured: q.Encoding.Unstructured && !q.Table && !q.Encoding.Partial,
	}
	return head.Body(q.Encoding.Protobuf, items), nil
}

// Send sends the body of a list.
func Send(body *frame.Body, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	send := func(pieces [][]byte, size int64) error {
		return stream.Send(&watchfanoutv1.ListChunk{Data: pieces, Size: size})
	}
	return body.Send(stream.Context(), &frame.Chunks{Bytes: frame.ChunkBytes, Send: send})
}

// compressedBytes is about the number of compressed bytes in one message.
const compressedBytes = 64 << 10

// compressed sends the body of a list as gzip.
func (l *Server) compressed(stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk], list *content) error {
	body := list.body
	out := &frame.Chunks{Bytes: compressedBytes, Send: func(pieces [][]byte, size int64) error {
		// Only the first message has the size; its Gzip is valid for all messages.
		return stream.Send(&watchfanoutv1.ListChunk{Data: pieces, Size: size, Gzip: size > 0})
	}}
	out.Begin(body.Size)
	_ = out.Add(deflate.Header()) // the next Add returns the same error
	var sum deflate.Sum
	add := func(p *deflate.Part) error {
		sum.Add(p)
		return out.Add(p.Data)
	}
	err := add(deflate.Stored(body.Head))
	if err == nil {
		// The first message is sent before anything is compressed, so that the gateway does not time out and delegate.
		err = out.End()
	}
	for first := 0; first < len(list.items) && err == nil; {
		end := l.runs.end(list, first)
		var part *deflate.Part
		if part, err = l.runs.part(list, first, end); err == nil {
			err = add(part)
		}
		if err == nil {
			err = stream.Context().Err() // the client may be gone
		}
		first = end
	}
	if err != nil {
		return rpc.ToStatus(err)
	}
	_ = add(deflate.Stored(body.Tail))
	_ = out.Add(sum.Trailer())
	return out.End()
}

// sortedTable is the only resource whose Tables are not sorted by name.
const sortedTable = "flowschemas.flowcontrol.apiserver.k8s.io"

// Page holds the objects of a list or of a page of it, and the fields of its metadata.
type Page struct {
	Items     []*cache.Item
	Revision  int64
	Continue  string
	Remaining *int64
	// read is the number of objects read to select Items, by the index of a field if index is not empty.
	read  int
	index string
	// count is the number of the list's objects from the first key of the page on, and then from the next page's key
	// on, or unknownCount.
	count int64
}

// page selects the objects of a list, by Kubernetes' rules for resourceVersion, limit and continue.
func (l *Server) page(ctx context.Context, q *query.Query, r *watchfanoutv1.ListRequest) (*Page, error) {
	limit := r.Limit
	// kube-apiserver's watch cache ignores limit for resourceVersion "0"; it does not cache events.
	if r.ResourceVersion == "0" && q.Entry.StorageResource != "events" {
		limit = 0
	}
	epoch := l.cache.Epoch() // if it changes meanwhile, registry serves the next page
	snapshot, from, err := l.snapshotFor(ctx, q, r)
	if err != nil {
		return nil, err
	}
	p := &Page{Revision: snapshot.Revision}
	if name, ok := q.ExactName(); ok && r.Continue == "" {
		return p, p.selectName(q, snapshot, cache.Key(q.Namespace, name))
	}
	if _, _, unreadable := snapshot.Unreadable(q.Prefix()); unreadable && !q.SkipUnreadable {
		return nil, rpc.ErrDelegate // registry returns the error
	}
	p.count = unknownCount
	if q.CountsRemaining() && limit > 0 {
		p.count = l.countFrom(q.Entry.StorageResource, snapshot, pageStart{q.Prefix(), from})
	}
	next, err := p.selectFrom(ctx, q, snapshot, from, limit)
	if next != "" {
		l.putSnapshot(q.Entry.StorageResource, epoch, snapshot, pageStart{q.Prefix(), next}, p.count)
	}
	return p, err
}

// selectName selects the object with a key.
func (p *Page) selectName(q *query.Query, snapshot *cache.Snapshot, key string) error {
	i, ok := snapshot.Get(key)
	switch {
	case !ok && snapshot.IsUnreadable(key) && !q.SkipUnreadable:
		return rpc.ErrDelegate
	case ok && q.Matches(i):
		p.Items, p.read = append(p.Items, i), 1
	}
	return nil
}

// selectFrom selects up to limit objects from a key on. It returns the key from which the next page begins, if there is
// one. If the list has a remainingItemCount and p.count is unknown, selectFrom counts the objects.
func (p *Page) selectFrom(ctx context.Context, q *query.Query, snapshot *cache.Snapshot, from string,
	limit int64) (next string, err error) {
	visited, visitedToLast, more := int64(0), int64(0), false
	err = snapshot.Select(ctx, q.Trigger(), q.Prefix(), from, func(i *cache.Item) bool {
		visited++
		if limit > 0 && int64(len(p.Items)) >= limit {
			more = true
			return q.CountsRemaining() && p.count == unknownCount
		}
		if q.Matches(i) {
			p.Items, visitedToLast = append(p.Items, i), visited
		}
		return true
	})
	p.read, p.index = int(visited), q.Trigger().Index()
	if err != nil || !more {
		return "", err
	}
	next = p.Items[len(p.Items)-1].Key + "\x00"
	p.Continue = encodeContinue(p.Revision, "/"+strings.TrimPrefix(next, q.Prefix()))
	if q.CountsRemaining() {
		if p.count == unknownCount {
			p.count = visited
		}
		remaining := p.count - limit
		p.Remaining = &remaining
		p.count -= visitedToLast
	}
	return next, nil
}

// snapshotFor returns the snapshot that serves a list, and the key to start at.
func (l *Server) snapshotFor(
	ctx context.Context,
	q *query.Query,
	r *watchfanoutv1.ListRequest,
) (*cache.Snapshot, string, error) {
	res, began := l.cache.Resource(q.Entry.StorageResource), time.Now()
	if r.Continue != "" {
		if r.ResourceVersion != "" && r.ResourceVersion != "0" {
			return nil, "", rpc.ErrDelegate // registry returns the error
		}
		revision, start, err := decodeContinue(r.Continue)
		if err != nil {
			return nil, "", err
		}
		if found, ok := l.cachedSnapshot(q.Entry.StorageResource, revision); ok {
			return found, q.Prefix() + start, nil
		}
		if err := l.logReader.WaitUntilFresh(ctx, revision); err != nil {
			return nil, "", rpc.ErrDelegate
		}
		if _, err := l.logReader.Snapshot(ctx, res, ""); err != nil { // loads the resource
			return nil, "", rpc.ErrDelegate
		}
		if unchanged, ok := res.SnapshotAt(revision); ok {
			return unchanged, q.Prefix() + start, nil
		}
		return nil, "", rpc.ErrDelegate
	}
	switch rv := r.ResourceVersion; {
	case r.ResourceVersionMatch == string(metav1.ResourceVersionMatchExact),
		rv != "" && rv != "0" && r.Limit > 0 && r.ResourceVersionMatch == "":
		return nil, "", rpc.ErrDelegate
	case rv == "":
		// If the log stalls, registry can still serve the list.
		err := l.logReader.WaitUntilConsistent(ctx)
		res.ObserveReadWait(began)
		res.CountConsistentRead(err != nil)
		if err != nil {
			return nil, "", rpc.ErrDelegate
		}
	case rv != "0":
		revision, err := strconv.ParseUint(rv, 10, 63)
		if err != nil {
			return nil, "", rpc.ErrDelegate // registry returns the error
		}
		err = l.logReader.WaitUntilFresh(ctx, int64(revision))
		res.ObserveReadWait(began)
		if err != nil {
			return nil, "", err
		}
	}
	loadCtx, cancel := context.WithTimeout(ctx, coldTimeout)
	defer cancel()
	snapshot, err := l.logReader.Snapshot(loadCtx, res, q.Trigger().Index())
	// The load continues after coldTimeout, or has failed.
	if err != nil && ctx.Err() == nil {
		slog.Debug("Delegating a list to registry", "resource", q.Entry.StorageResource, "error", err)
		err = rpc.ErrDelegate
	}
	return snapshot, "", err
}
