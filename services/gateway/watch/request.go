package watch

import (
	"context"
	"time"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
)

// Request is a client's watch request.
type Request struct {
	*watchfanoutv1.WatchRequest
	// User is the name of the watch's user.
	User string
	// StorageResource is the resource that the watched objects are stored as. It selects the replica.
	StorageResource string
	// Log is the event log of the resource's etcd.
	Log string
	// Deadline is when the watch times out.
	Deadline time.Time
	// BookmarkPeriod is the minimum time between bookmarks, if the client allows bookmarks. 0: every bookmark is sent.
	BookmarkPeriod time.Duration
	// Stopping ends the watch before Deadline, when the gateway shuts down. nil: a shutdown does not end it.
	Stopping <-chan struct{}
	// PolicyChanged returns a channel that is closed when a permission may have been revoked. Allowed then reports
	// whether the client may still watch. Allowed waits for a while if authz is unavailable. It returns true if its
	// context ends first.
	PolicyChanged func() <-chan struct{}
	Allowed       func(ctx context.Context) bool
	// Initialized is called, perhaps more than once, when the initial events have been sent or initializedTimeout has
	// passed. bytes is their size so far. The watch occupies its flow control seats until then. Nil: no call.
	Initialized func(bytes int64)
	// InitialEventsEnd is called when all initial events have been sent. Nil: no call.
	InitialEventsEnd func()
	// Compress makes the response a gzip body.
	Compress bool
	// Detached is the context of the watch after its handler has returned. Nil: the handler returns with the watch's
	// end.
	Detached context.Context
}

// Sink is a client's open response. Only the goroutine of Serve calls its methods.
type Sink interface {
	// SendHeaders sends the response headers, which name the encoding of a gzip body. It is called once.
	SendHeaders(gzip bool)
	// Write sends whole frames in consecutive pieces, or a part of a gzip body. It returns h2writer.ErrSlowClient if
	// the client accepts no data for writeTimeout.
	Write(ctx context.Context, writeTimeout time.Duration, frames ...[]byte) error
	// Fail sends an error response. It is called only before SendHeaders.
	Fail(error)
	// Hijack makes the response writable by other goroutines, and returns nil if that is impossible. It is called only
	// after SendHeaders.
	Hijack(ctx context.Context) *h2writer.Stream
}
