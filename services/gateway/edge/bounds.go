package edge

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/services/gateway/answer"
)

// BoundsConfig is how much of a gateway one user may take that lasts: flow control counts what ends.
type BoundsConfig struct {
	// Connections and Streams are of one user at one gateway; 0: no bound.
	Connections, Streams int
}

func (c *BoundsConfig) addFlags(fs *pflag.FlagSet) {
	fs.IntVar(&c.Connections, "max-connections-per-user", 10000,
		"How many connections one user may have open to a gateway; a request on a further one is answered 429. "+
			"The service accounts of a namespace are one user. 0: no bound. Nodes, system:masters and the service "+
			"accounts of kube-system have none.")
	fs.IntVar(&c.Streams, "max-streams-per-user", 5000,
		"How many watches and other long-running requests (logs, exec, port-forward, proxies) one user may have "+
			"open at a gateway; a further one is answered 429, as with "+
			"--max-connections-per-user. 0: no bound.")
}

// Validate names the flag that is wrong.
func (c *BoundsConfig) Validate() error {
	for name, n := range map[string]int{
		"max-connections-per-user": c.Connections,
		"max-streams-per-user":     c.Streams,
	} {
		if n < 0 {
			return fmt.Errorf("--%s %d: must not be negative; 0 is no bound", name, n)
		}
	}
	return nil
}

var overBound = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_gateway_user_limit_exceeded_total",
	Help: "Requests refused because their user had --max-connections-per-user or --max-streams-per-user open.",
}, []string{"bound"})

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{overBound} }

// bounds counts what users have open. A user is, as to flow control, whom a request is for: the impersonated one.
type bounds struct {
	config *BoundsConfig

	mu sync.Mutex
	// connections are the open ones, and whom each has had requests of. users are only those who have something open.
	connections map[net.Conn]*connection
	users       map[string]*open
}

// connection is one client's. Its users are guarded by the bounds' lock.
type connection struct {
	users map[string]struct{}
	// kept: somebody has requests on it who has no bound.
	kept, gone bool
}

// open is how much a user has.
type open struct{ connections, streams int }

func newBounds(c *BoundsConfig) *bounds {
	return &bounds{config: c, connections: map[net.Conn]*connection{}, users: map[string]*open{}}
}

type connectionKey struct{}

// watch has a server's connections counted.
func (b *bounds) watch(srv *http.Server) {
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		made := &connection{users: map[string]struct{}{}}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.connections[c] = made
		return context.WithValue(ctx, connectionKey{}, made)
	}
	srv.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked { // of who took it over, its stream counts
			b.closed(c)
		}
	}
}

// within is ctx with the connection of c, for a server that is not net/http's.
func (b *bounds) within(ctx context.Context, c net.Conn) context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	return context.WithValue(ctx, connectionKey{}, b.connections[c])
}

func (b *bounds) closed(c net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.connections[c]
	if was == nil {
		return
	}
	delete(b.connections, c)
	was.gone = true
	for name := range was.users {
		b.change(name, func(o *open) { o.connections-- })
	}
}

// change is called with the lock held.
func (b *bounds) change(name string, by func(*open)) {
	o := b.users[name]
	if o == nil {
		o = &open{}
		b.users[name] = o
	}
	by(o)
	if *o == (open{}) {
		delete(b.users, name)
	}
}

// of is what a user has open, with the lock held.
func (b *bounds) of(name string) open {
	if o := b.users[name]; o != nil {
		return *o
	}
	return open{}
}

// unused says whether a connection counts for nobody.
func (b *bounds) unused(c *connection) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(c.users) == 0 && !c.kept
}

// usersCounted is how many users a connection counts for, the first that it has requests of: a front proxy's has those
// of any number.
const usersCounted = 16

// isProbe says whether a path is asked by load balancers and kubelets, who are to be answered whoever else has
// connections open; flow control exempts them too.
func isProbe(path string) bool {
	return slices.ContainsFunc([]string{"/healthz", "/livez", "/readyz"}, func(p string) bool {
		rest, ok := strings.CutPrefix(path, p)
		return ok && (rest == "" || rest[0] == '/')
	})
}

// connect counts a connection as the user's, once; false where the user has too many.
func (b *bounds) connect(c *connection, name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if name == "" {
		c.kept = true
		return true
	}
	if _, known := c.users[name]; known || c.gone || len(c.users) >= usersCounted {
		return true
	}
	if b.config.Connections > 0 && b.of(name).connections >= b.config.Connections {
		return false
	}
	c.users[name] = struct{}{}
	b.change(name, func(o *open) { o.connections++ })
	return true
}

// stream counts a long-running request until end is called; false where the user has too many.
func (b *bounds) stream(name string) (end func(), ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.config.Streams > 0 && b.of(name).streams >= b.config.Streams {
		return nil, false
	}
	b.change(name, func(o *open) { o.streams++ })
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.change(name, func(o *open) { o.streams-- })
	}, true
}

// retryBoundAfter is after how many seconds who is over a bound is to come back.
const retryBoundAfter = 10

// filter refuses what a user has too much of.
func (b *bounds) filter(next http.Handler) http.Handler {
	refuse := func(w http.ResponseWriter, req *http.Request, bound string, most int) {
		overBound.WithLabelValues(bound).Inc()
		w.Header().Set("Retry-After", fmt.Sprint(retryBoundAfter))
		answer.Error(w, req, answer.V1, apierrors.NewTooManyRequests(fmt.Sprintf(
			"the user has %d %s open at this server, and may have no more", most, bound), retryBoundAfter))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u, ok := request.UserFrom(req.Context())
		if !ok || isProbe(req.URL.Path) {
			next.ServeHTTP(w, req)
			return
		}
		owner := identity.QuotaOwner(u, req.RemoteAddr)
		if c, ok := req.Context().Value(connectionKey{}).(*connection); ok && c != nil && !b.connect(c, owner) {
			if b.unused(c) {
				w.Header().Set("Connection", "close") // GOAWAY, over HTTP/2
			}
			refuse(w, req, "connections", b.config.Connections)
			return
		}
		if owner == "" {
			next.ServeHTTP(w, req)
			return
		}
		if info, ok := request.RequestInfoFrom(req.Context()); ok && LongRunning(req, info) {
			end, ok := b.stream(owner)
			if !ok {
				refuse(w, req, "streams", b.config.Streams)
				return
			}
			defer end()
		}
		next.ServeHTTP(w, req)
	})
}
