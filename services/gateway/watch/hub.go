// Package watch keeps clients' watches open and lets those that ask the same share one stream from their source: the
// watch tier or, for authn, authz and admission, registry.
//
// A watch begins alone, with a stream of its own, for as long as it is behind: its initial events, or a replay. Once it
// has come to where the shared stream (a feed) is, it joins it. It leaves when the feed no longer holds what comes next
// for it, and is alone again. Either way its place is the position of the last event that it was sent, and so a lost
// replica, a lost feed and a slow client all come to the same: go on after that position.
package watch

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// Config is how watches are kept.
type Config struct {
	// BookmarkPeriod is how often a watch that allows bookmarks gets one.
	BookmarkPeriod time.Duration
	// WriteTimeout is how long a client may take no byte of what is due to it before it is cut off.
	WriteTimeout time.Duration
	// BroadcastBytes bounds the recent events that a feed keeps for those who fall behind.
	BroadcastBytes int
	// BroadcastTotalBytes bounds what all feeds together keep, and again what is kept of initial events that watches share.
	// Where that is used up those go at the pace of the slowest that shares them.
	BroadcastTotalBytes int64
	// UserRate is how many events a second the watches of one user are delivered; an event counts as one, and as one
	// more for each KB. 0: there is no bound.
	UserRate int
}

// AddFlags registers the flags --watch-*, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&c.BookmarkPeriod, "watch-bookmark-period", time.Minute,
		"How often a watch that allows bookmarks gets one.")
	fs.DurationVar(&c.WriteTimeout, "watch-write-timeout", 30*time.Second,
		"How long a watch's client may take no byte of what is due to it before its stream is ended.")
	fs.IntVar(&c.UserRate, "max-watch-rate-per-user", 100000,
		"How many events a second all watches of one user together are delivered by a gateway, ten seconds' worth of "+
			"them at once; an event counts as one, and as one more for each KB. What is over comes later, and a watch "+
			"that falls too far behind so is ended. 0: no bound. Nodes, system:masters and the service accounts of "+
			"kube-system have none.")
	fs.Int64Var(&c.BroadcastTotalBytes, "watch-broadcast-total-bytes", 256<<20,
		"How many bytes of recent events all shared streams together keep for clients that are behind.")
	fs.IntVar(&c.BroadcastBytes, "watch-broadcast-bytes", 4<<20,
		"How many bytes of recent events are kept for the clients of one shared stream; who falls further behind "+
			"goes on with a stream of its own.")
}

// Validate names the flag that is wrong.
func (c *Config) Validate() error {
	if c.UserRate < 0 {
		return fmt.Errorf("--max-watch-rate-per-user %d: must not be negative; 0 is no bound", c.UserRate)
	}
	return nil
}

const (
	// resumeTimeout is how long a stream waits for its source to come back before it is closed and the client asks anew.
	resumeTimeout = 30 * time.Second
	// idleTimeout is how long a feed outlives its last client: client-go watches again at once when its watch has timed out.
	idleTimeout = 500 * time.Millisecond
	// lastBookmarkLead is how long before a watch's time is up its last bookmark is sent, as kube-apiserver's
	// (k8s.io/apiserver/pkg/storage/cacher, cacheWatcher.nextBookmarkTime).
	lastBookmarkLead = 2 * time.Second
	// firstBookmarkDelay is how long after its beginning a watch's first bookmark is due, as kube-apiserver's.
	firstBookmarkDelay = time.Second
	// headersDelay is how long an answer may wait for its first frame before its head is sent without one.
	headersDelay = 50 * time.Millisecond
	// revisionTimeout is how long a watch waits to be told whether etcd has come to where it begins, before it begins
	// alone.
	revisionTimeout = time.Second
	// rejoinBackoff is how long a client whose feed has ended stays away from the next one: what ended it may end that as
	// well.
	rejoinBackoff = 10 * time.Second
	// minRetryDelay is the pause before the next replica is tried, and maxRetryDelay what it grows to while none answers.
	minRetryDelay = 20 * time.Millisecond
	maxRetryDelay = 500 * time.Millisecond
)

// retryDelay is how long to wait before the next try, by for how long none has succeeded.
func retryDelay(unavailableSince time.Time) time.Duration {
	return min(maxRetryDelay, max(minRetryDelay, time.Since(unavailableSince)/4))
}

// Sink is a client's open response. Its methods are called by one goroutine.
type Sink interface {
	// SendHeaders sends the head, once.
	SendHeaders()
	// Write sends whole frames. It is wire.ErrSlow when the client takes nothing for as long as patience.
	Write(ctx context.Context, writeTimeout time.Duration, frames ...[]byte) error
	// Fail answers an error; only before SendHeaders.
	Fail(error)
	// Hijack makes the response one that others may write as well; nil where that is impossible. Only after
	// SendHeaders.
	Hijack(ctx context.Context) *h2writer.Stream
}

// Watcher is the source of events: the watch tier or registry.
type Watcher interface {
	Watch(context.Context, *watchfanoutv1.WatchRequest,
		...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error)
}

// Hub is all open watches that a gateway fills from one source.
type Hub struct {
	Client Watcher
	Config *Config
	// MemoryQuota is what the feeds of all hubs keep together; its own where it is nil.
	MemoryQuota *MemoryQuota
	// RateLimiter are those of the users of all hubs; nil: nobody has one.
	RateLimiter *RateLimiter
	// InflightQuota is what watches of all hubs hold for their clients.
	InflightQuota *InflightQuota
	// Revision is etcd's now. Without it a client that names a place further than a feed has come does not join it at
	// once.
	Revision func(context.Context) (int64, error)

	revisions coalesce.Group[int64]

	ownQuota   MemoryQuota
	mu         sync.Mutex
	broadcasts map[key]*watchBroadcast
	// initialEvents are those that have not answered, by what is asked; those that have are known to who is in them.
	initialEvents map[string]*initialEventsQueue
	// bufferedBytes is what all flights keep, up to Config.BroadcastTotalBytes.
	bufferedBytes atomic.Int64
	// startDelay is how long those who ask wait for the flight before theirs to answer; 0: defaultStartDelay.
	startDelay time.Duration
}

type key [sha256.Size]byte

func (h *Hub) quota() *MemoryQuota {
	if h.MemoryQuota != nil {
		return h.MemoryQuota
	}
	return &h.ownQuota
}

// Gauges and counters of this package.
var (
	clients = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_clients",
		Help: "Open watches of clients.",
	})
	receivers = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcast_receivers",
		Help: "Open watches that share a stream with others that ask the same.",
	})
	broadcasts = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcasts",
		Help: "Streams that watches share.",
	})
	broadcastBytes = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_gateway_watch_broadcast_bytes",
		Help: "Bytes of recent events that shared streams keep.",
	})
	delivered = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_events_total",
		Help: "Events written to clients from shared streams.",
	})
	resumes = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_resumes_total",
		Help: "Times that a stream went on with another replica of their source, unseen by clients.",
	})
	reassignments = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_reassignments_total",
		Help: "Times that a stream was taken over by a replica that serves its resource now, while the one before still did.",
	})
	slowClients = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_gateway_watch_slow_clients_total",
		Help: "Watches ended because the client took nothing for --watch-write-timeout.",
	})
)

var overRate = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "watershed_gateway_watches_over_rate_total",
	Help: "Watches ended because their user's were delivered more than --max-watch-rate-per-user, and they fell too far behind.",
})

var throttledWatches = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_watches_throttled",
	Help: "Watches that wait because their user's are delivered more than --max-watch-rate-per-user.",
})

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{
		clients,
		receivers,
		broadcasts,
		broadcastBytes,
		delivered,
		resumes,
		reassignments,
		slowClients,
		overRate,
		throttledWatches,
		inflightBytes,
	}
}

// keyOf returns the key of the feed that a query of an owner uses. Owners have feeds of their own, because a replica
// delays the large events of an owner with many streams: another owner's watches must not wait behind these. When the
// resource was defined is no part of the key, because the source ends the watches of a resource that is redefined.
func keyOf(q *watchfanoutv1.Query, owner string) (key, error) {
	identity := &watchfanoutv1.Query{
		Resource:      q.Resource,
		Namespace:     q.Namespace,
		LabelSelector: q.LabelSelector,
		FieldSelector: q.FieldSelector,
		Output:        q.Output,
		IncludeObject: q.IncludeObject,
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(identity)
	if err != nil {
		return key{}, err
	}
	ownerHash := sha256.Sum256([]byte(owner))
	return sha256.Sum256(append(ownerHash[:], data...)), nil
}

// joinBroadcast adds a client at a position to the feed of its query, which is begun there if there is none and the tier has
// reached the position: a client may name any revision, and the others are not to wait for it. It answers nil where
// there is no feed that holds what comes after the position.
func (h *Hub) joinBroadcast(k key, r *Request, position events.Position, reached bool) (*watchBroadcast, *receiver) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.broadcasts[k]
	if !reached && b == nil {
		return nil, nil
	}
	if b == nil {
		ctx, cancel := context.WithCancel(context.Background())
		b = &watchBroadcast{
			hub:             h,
			key:             k,
			query:           r.Query,
			storageResource: r.StorageResource,
			owner:           r.Owner,
			served:          r.Served,
			low:             position,
			high:            position,
			cancel:          cancel,
		}
		if h.broadcasts == nil {
			h.broadcasts = map[key]*watchBroadcast{}
		}
		h.broadcasts[k] = b
		broadcasts.Inc()
		h.quota().enter(b)
		go b.run(ctx)
	}
	return b, b.join(position)
}

// revisionExists says whether etcd has come to the client's resourceVersion. A larger one is of another history, from before a
// backup was restored: a feed would leave out in silence what comes before it.
func (h *Hub) revisionExists(ctx context.Context, k key, position events.Position) bool {
	h.mu.Lock()
	b := h.broadcasts[k]
	h.mu.Unlock()
	if b == nil || !b.isBehind(position) {
		return true
	}
	if h.Revision == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, revisionTimeout)
	defer cancel()
	now, err := h.revisions.Get(ctx, "", h.Revision)
	return err == nil && position.Revision <= now
}

// joinable says whether a client at a position could join.
func (h *Hub) joinable(k key, position events.Position) bool {
	h.mu.Lock()
	b := h.broadcasts[k]
	h.mu.Unlock()
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.ended && !position.Before(b.low) && !position.DifferentEpoch(b.high)
}

// drop forgets a feed: it has ended.
func (h *Hub) drop(b *watchBroadcast) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.broadcasts[b.key] == b {
		delete(h.broadcasts, b.key)
		broadcasts.Dec()
	}
	b.cancel()
}

// positionAfter is the place after everything of a resourceVersion; ok is false where it is none that a log has.
func positionAfter(resourceVersion string) (events.Position, bool) {
	n, err := strconv.ParseInt(resourceVersion, 10, 64)
	return events.Position{Revision: n, Index: events.LastIndex}, err == nil && n > 0
}
