package server

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
	"watershed.dev/services/gateway/responsewriters"
)

// UserLimitsConfig is how much of a gateway one user may take that lasts: flow control counts what ends.
type UserLimitsConfig struct {
	// Connections and Streams are of one user at one gateway; 0: no bound.
	Connections, Streams int
}

func (c *UserLimitsConfig) addFlags(fs *pflag.FlagSet) {
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
func (c *UserLimitsConfig) Validate() error {
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

var overUserLimit = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_gateway_user_limit_exceeded_total",
	Help: "Requests refused because their user had --max-connections-per-user or --max-streams-per-user open.",
}, []string{"limit"})

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{overUserLimit} }

// userLimits counts what users have open. A user is, as to flow control, whom a request is for: the impersonated one.
type userLimits struct {
	config *UserLimitsConfig

	mu sync.Mutex
	// connections are the open ones, and whom each has had requests of. users are only those who have something open.
	connections map[net.Conn]*trackedConn
	users       map[string]*usage
}

// trackedConn is one client's. Its users are guarded by the bounds' lock.
type trackedConn struct {
	users map[string]struct{}
	// exempt: somebody has requests on it who has no bound.
	exempt, closed bool
}

// usage is how much a user has.
type usage struct{ connections, streams int }

func newUserLimits(c *UserLimitsConfig) *userLimits {
	return &userLimits{config: c, connections: map[net.Conn]*trackedConn{}, users: map[string]*usage{}}
}

type connKey struct{}

// trackConnections has a server's connections counted.
func (l *userLimits) trackConnections(srv *http.Server) {
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		conn := &trackedConn{users: map[string]struct{}{}}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.connections[c] = conn
		return context.WithValue(ctx, connKey{}, conn)
	}
	srv.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked { // of who took it over, its stream counts
			l.connClosed(c)
		}
	}
}

// connContext is ctx with the connection of c, for a server that is not net/http's.
func (l *userLimits) connContext(ctx context.Context, c net.Conn) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	return context.WithValue(ctx, connKey{}, l.connections[c])
}

func (l *userLimits) connClosed(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	conn := l.connections[c]
	if conn == nil {
		return
	}
	delete(l.connections, c)
	conn.closed = true
	for name := range conn.users {
		l.updateUsage(name, func(o *usage) { o.connections-- })
	}
}

// updateUsage is called with the lock held.
func (l *userLimits) updateUsage(name string, update func(*usage)) {
	o := l.users[name]
	if o == nil {
		o = &usage{}
		l.users[name] = o
	}
	update(o)
	if *o == (usage{}) {
		delete(l.users, name)
	}
}

// usageOf is what a user has open, with the lock held.
func (l *userLimits) usageOf(name string) usage {
	if o := l.users[name]; o != nil {
		return *o
	}
	return usage{}
}

// isUnattributed says whether a connection counts for nobody.
func (l *userLimits) isUnattributed(c *trackedConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(c.users) == 0 && !c.exempt
}

// maxConnUsers is how many users a connection counts for, the first that it has requests of: a front proxy's has those
// of any number.
const maxConnUsers = 16

// isProbe says whether a path is asked by load balancers and kubelets, who are to be answered whoever else has
// connections open; flow control exempts them too.
func isProbe(path string) bool {
	return slices.ContainsFunc([]string{"/healthz", "/livez", "/readyz"}, func(p string) bool {
		rest, ok := strings.CutPrefix(path, p)
		return ok && (rest == "" || rest[0] == '/')
	})
}

// acquireConnection counts a connection as the user's, once; false where the user has too many.
func (l *userLimits) acquireConnection(c *trackedConn, name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if name == "" {
		c.exempt = true
		return true
	}
	if _, known := c.users[name]; known || c.closed || len(c.users) >= maxConnUsers {
		return true
	}
	if l.config.Connections > 0 && l.usageOf(name).connections >= l.config.Connections {
		return false
	}
	c.users[name] = struct{}{}
	l.updateUsage(name, func(o *usage) { o.connections++ })
	return true
}

// acquireStream counts a long-running request until end is called; false where the user has too many.
func (l *userLimits) acquireStream(name string) (end func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.config.Streams > 0 && l.usageOf(name).streams >= l.config.Streams {
		return nil, false
	}
	l.updateUsage(name, func(o *usage) { o.streams++ })
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.updateUsage(name, func(o *usage) { o.streams-- })
	}, true
}

// limitRetryAfter is after how many seconds who is over a bound is to come back.
const limitRetryAfter = 10

// filter refuses what a user has too much of.
func (l *userLimits) filter(next http.Handler) http.Handler {
	refuse := func(w http.ResponseWriter, req *http.Request, limit string, maximum int) {
		overUserLimit.WithLabelValues(limit).Inc()
		w.Header().Set("Retry-After", fmt.Sprint(limitRetryAfter))
		responsewriters.Error(w, req, responsewriters.V1, apierrors.NewTooManyRequests(fmt.Sprintf(
			"the user has %d %s open at this server, and may have no more", maximum, limit), limitRetryAfter))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u, ok := request.UserFrom(req.Context())
		if !ok || isProbe(req.URL.Path) {
			next.ServeHTTP(w, req)
			return
		}
		owner := identity.QuotaOwner(u, req.RemoteAddr)
		if c, ok := req.Context().Value(connKey{}).(*trackedConn); ok && c != nil && !l.acquireConnection(c, owner) {
			if l.isUnattributed(c) {
				w.Header().Set("Connection", "close") // GOAWAY, over HTTP/2
			}
			refuse(w, req, "connections", l.config.Connections)
			return
		}
		if owner == "" {
			next.ServeHTTP(w, req)
			return
		}
		if info, ok := request.RequestInfoFrom(req.Context()); ok && LongRunning(req, info) {
			end, ok := l.acquireStream(owner)
			if !ok {
				refuse(w, req, "streams", l.config.Streams)
				return
			}
			defer end()
		}
		next.ServeHTTP(w, req)
	})
}
