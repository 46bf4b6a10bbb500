package server

import (
	"context"
	"errors"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/util/waitgroup"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/services/gateway/h2writer"
)

// shutDown stops the server in kube-apiserver's order (k8s.io/apiserver/pkg/server/genericapiserver.go). First it is
// not ready and still serves for the delay. Then it accepts no connection and sends GOAWAY on the open connections.
// Requests finish by themselves, and watches end over their grace period.
func (s *Server) shutDown(srv *http.Server) error {
	c := s.config
	close(s.ShuttingDown)
	time.Sleep(c.ShutdownDelay)
	close(s.delayOver)
	drain, cancel := context.WithTimeout(context.Background(), c.RequestTimeout+c.WatchGracePeriod)
	defer cancel()
	go func() {
		for _, w := range s.shutdownStagger {
			close(w)
			time.Sleep(c.WatchGracePeriod / time.Duration(len(s.shutdownStagger)))
		}
	}()
	idle := endOf(s.InFlight) // no request uses a hijacked connection
	closing := drain
	if c.ShutdownSendRetryAfter {
		grace, cancelGrace := context.WithTimeout(drain, c.WatchGracePeriod)
		defer cancelGrace()
		await(drain, idle)
		await(grace, endOf(&s.watches.open))
		var cancelClosing func()
		closing, cancelClosing = context.WithTimeout(context.Background(), retryAfterCloseTimeout)
		defer cancelClosing()
	}
	if !closeConnections(closing, srv) {
		s.userLimits.closeSockets()
		return srv.Close()
	}
	await(drain, idle)
	return nil
}

// retryAfterCloseTimeout is how long connections may take to close after the window of --shutdown-send-retry-after.
// net/http waits for a second after GOAWAY.
const retryAfterCloseTimeout = 2 * time.Second

// endOf returns a channel that is closed once all requests of a group have ended.
func endOf(requests *waitgroup.SafeWaitGroup) <-chan struct{} {
	ended := make(chan struct{})
	go func() { requests.Wait(); close(ended) }()
	return ended
}

// await waits until ended is closed or ctx is done.
func await(ctx context.Context, ended <-chan struct{}) {
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// goawayInterval is how often a draining server sends GOAWAY on the connections that have not received it.
const goawayInterval = 500 * time.Millisecond

// closeConnections closes the listener, and each connection once it is idle. It returns false if ctx ends before.
// Shutdown sends GOAWAY on the HTTP/2 connections that it finds. If the handshake of a connection ends later, Shutdown
// would wait for it until ctx ends, and its client would open watches that end at once. So Shutdown is called again.
func closeConnections(ctx context.Context, srv *http.Server) bool {
	for {
		attempt, cancel := context.WithTimeout(ctx, goawayInterval)
		err := srv.Shutdown(attempt)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err == nil
		}
	}
}

// openWatches counts the clients' watches, and lets them begin until a channel is closed. Upstream's filter then
// responds 503. Without it such a watch would end at once with a bookmark, and client-go would open it again without a
// pause. kube-apiserver has the filter if --shutdown-watch-termination-grace-period is set.
type openWatches struct {
	until chan struct{}
	open  waitgroup.SafeWaitGroup
}

// Add implements genericfilters.RequestWaitGroup.
func (o *openWatches) Add(n int) error {
	select {
	case <-o.until:
		return errors.New("the server is shutting down")
	default:
		return o.open.Add(n)
	}
}

// Done implements genericfilters.RequestWaitGroup. It does nothing, because a detached watch outlasts its handler.
func (*openWatches) Done() {}

// ShuttingDown implements request.ServerShutdownSignal.
func (o *openWatches) ShuttingDown() <-chan struct{} { return o.until }

// countEnds counts the end of each watch that Add has counted.
func (o *openWatches) countEnds(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if info, ok := request.RequestInfoFrom(req.Context()); ok && info.Verb == "watch" {
			defer h2writer.AtEnd(req, func(any) { o.open.Done() })
		}
		h.ServeHTTP(w, req)
	})
}
