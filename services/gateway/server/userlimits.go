package server

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/config"
	"watershed.dev/platform/identity"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/responsewriters"
)

// UserLimitsConfig limits the connections and streams of a user. Flow control limits only requests that end.
type UserLimitsConfig struct {
	// Connections and Streams are maximums per user and gateway. 0: no limit.
	Connections, Streams int
}

func (c *UserLimitsConfig) addFlags(fs *pflag.FlagSet) {
	fs.IntVar(&c.Connections, "max-connections-per-user", 10000,
		"The maximum number of open connections of a user per gateway. Requests on further connections get 429. "+
			"It also bounds the connections of an address, or of a /64 network of IPv6, without an authenticated "+
			"request: the oldest is then closed. The service accounts of a namespace count as a single user. 0: no "+
			"limit. Nodes, system:masters and the service accounts of kube-system have no limit.")
	fs.IntVar(&c.Streams, "max-streams-per-user", 5000,
		"The maximum number of open watches and other long-running requests (logs, exec, port-forward, proxies) of "+
			"a user per gateway. Their paths, headers, and 16 times their queries may take 16 KB times this "+
			"number, and at least 32 MB. Further requests get 429. 0: no limit. The exemptions are those of "+
			"--max-connections-per-user.")
}

// Validate returns an error that names the invalid flag.
func (c *UserLimitsConfig) Validate() error {
	return errors.Join(
		config.AtLeast("max-connections-per-user", c.Connections, 0),
		config.AtLeast("max-streams-per-user", c.Streams, 0),
	)
}

var overUserLimit = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_gateway_user_limit_exceeded_total",
	Help: "Requests rejected because their user reached --max-connections-per-user or --max-streams-per-user, and " +
		"connections closed because their address reached --max-connections-per-user without authentication.",
}, []string{"limit"})

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{overUserLimit} }

// userLimits counts the connections and streams of users. As in flow control, a request counts for the impersonated
// user.
type userLimits struct {
	config *UserLimitsConfig

	mu sync.Mutex
	// connections holds the open connections. users holds only users with an open connection or stream.
	connections map[net.Conn]*trackedConn
	users       map[string]*usage
	// unattributed are the connections (net.Conn) of each host that count for no user yet, the oldest first.
	unattributed map[string]*list.List
}

// trackedConn is a client's connection. userLimits.mu guards it. users are the users that it counts for.
type trackedConn struct {
	users map[string]struct{}
	// host is the client's host, and place the connection's place in unattributed while it counts for no user.
	host  string
	place *list.Element
	// exempt: the connection has carried requests of a user without a limit.
	exempt, closed bool
}

// usage is the number of a user's open connections and streams, and the size of the requests of these streams.
type usage struct{ connections, streams, requestBytes int }

func newUserLimits(c *UserLimitsConfig) *userLimits {
	return &userLimits{config: c, connections: map[net.Conn]*trackedConn{}, users: map[string]*usage{},
		unattributed: map[string]*list.List{}}
}

type connKey struct{}

// trackConnections makes srv count its connections. A connection counts for the client's host until its first request
// is authenticated. If the host exceeds the limit of a user, its oldest such connection is closed: each 401 would renew
// the idle timeout. The newest stays, because others may share the address, and authenticate at once.
func (l *userLimits) trackConnections(srv *http.Server) {
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		conn := &trackedConn{users: map[string]struct{}{}, host: identity.Host(c.RemoteAddr().String())}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.connections[c] = conn
		all := l.unattributed[conn.host]
		if all == nil {
			all = list.New()
			l.unattributed[conn.host] = all
		}
		conn.place = all.PushBack(c)
		if l.config.Connections > 0 && all.Len() > l.config.Connections {
			oldest := all.Front().Value.(net.Conn)
			l.attribute(l.connections[oldest])
			overUserLimit.WithLabelValues("unauthenticated connections").Inc()
			closeSocket(oldest)
		}
		return context.WithValue(ctx, connKey{}, conn)
	}
	srv.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked { // a hijacked connection counts as a stream
			l.connClosed(c)
		}
	}
}

// connContext adds the trackedConn of c to ctx, for a server that is not net/http's.
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
	l.attribute(conn)
	for name := range conn.users {
		l.updateUsage(name, func(o *usage) { o.connections-- })
	}
}

// closeSockets closes the connections below TLS. tls.Conn.Close would wait up to 5 s for each connection whose client
// does not read.
func (l *userLimits) closeSockets() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.connections {
		closeSocket(c)
	}
}

func closeSocket(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		_ = t.NetConn().Close()
	}
}

// attribute stops counting a connection for its host. The lock is held.
func (l *userLimits) attribute(c *trackedConn) {
	if c.place == nil {
		return
	}
	if all := l.unattributed[c.host]; all != nil {
		if all.Remove(c.place); all.Len() == 0 {
			delete(l.unattributed, c.host)
		}
	}
	c.place = nil
}

// updateUsage updates a user's usage. The lock is held.
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

// usageOf returns a user's usage. The lock is held.
func (l *userLimits) usageOf(name string) usage {
	if o := l.users[name]; o != nil {
		return *o
	}
	return usage{}
}

// isUnattributed reports whether a connection counts for no user.
func (l *userLimits) isUnattributed(c *trackedConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(c.users) == 0 && !c.exempt
}

// maxConnUsers is the maximum number of users that a connection counts for: the first that send requests on it. A front
// proxy's connection carries requests of any number of users.
const maxConnUsers = 16

// isProbe reports whether load balancers and kubelets probe the path. Probes must succeed even if users hold all of
// their connections; flow control exempts them too. The bound of their address applies.
func isProbe(path string) bool {
	return slices.ContainsFunc([]string{"/healthz", "/livez", "/readyz"}, func(p string) bool {
		rest, ok := strings.CutPrefix(path, p)
		return ok && (rest == "" || rest[0] == '/')
	})
}

// acquireConnection counts a connection for the user, once. It returns false if the user is at its limit.
func (l *userLimits) acquireConnection(c *trackedConn, name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if name == "" {
		c.exempt = true
		l.attribute(c)
		return true
	}
	if _, known := c.users[name]; known || c.closed || len(c.users) >= maxConnUsers {
		return true
	}
	if l.config.Connections > 0 && l.usageOf(name).connections >= l.config.Connections {
		return false
	}
	c.users[name] = struct{}{}
	l.attribute(c)
	l.updateUsage(name, func(o *usage) { o.connections++ })
	return true
}

const (
	// bytesPerStream times --max-streams-per-user, and at least minRequestBytes, bounds requestBytes of a user's open
	// streams. A watch of a Go client takes some 4 KB. A request has at most 1 MB, so a single request always fits.
	bytesPerStream  = 16 << 10
	minRequestBytes = 32 << 20
	// headerOverhead is the memory of a header beside its text, in bytes.
	headerOverhead = 128
	// selectorFactor is the memory of a parsed selector for each byte of its text.
	selectorFactor = 16
	// pathCopies is how many copies of its path a proxied request keeps.
	pathCopies = 4
)

// requestBytes is about how many bytes of memory a long-running request takes until its end. A watch keeps its
// selectors, and most requests keep their headers.
func requestBytes(req *http.Request, u user.Info) int {
	n := len(req.Host) + pathCopies*len(req.URL.Path) + selectorFactor*len(req.URL.RawQuery)
	for _, g := range u.GetGroups() { // a client may impersonate a user with any groups
		n += len(g)
	}
	for key, values := range u.GetExtra() {
		for _, v := range values {
			n += len(key) + len(v)
		}
	}
	for name, values := range req.Header {
		for _, v := range values {
			n += len(name) + len(v) + headerOverhead
		}
	}
	return n
}

// acquireStream counts a long-running request of n bytes until end is called. If the user is at a limit, end is nil,
// and acquireStream returns the limit's label in the metric, and the text of the error.
func (l *userLimits) acquireStream(name string, n int) (end func(), limit, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u, maxStreams := l.usageOf(name), l.config.Streams
	maxBytes := max(minRequestBytes, maxStreams*bytesPerStream)
	switch {
	case maxStreams > 0 && u.streams >= maxStreams:
		return nil, "streams", openText(maxStreams, "streams")
	case maxStreams > 0 && u.requestBytes+n > maxBytes:
		return nil, "stream request bytes", fmt.Sprintf(
			"the requests of the user's streams at this server would take more than %d bytes, which is the limit",
			maxBytes)
	}
	l.updateUsage(name, func(o *usage) { o.streams++; o.requestBytes += n })
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.updateUsage(name, func(o *usage) { o.streams--; o.requestBytes -= n })
	}, "", ""
}

// openText is the text of an error of a user that is at a limit.
func openText(n int, of string) string {
	return fmt.Sprintf("the user has %d %s open at this server, which is the limit", n, of)
}

// limitRetryAfter is the Retry-After of a user over a limit, in seconds.
const limitRetryAfter = 10

// filter rejects requests over a user's limit.
func (l *userLimits) filter(next http.Handler) http.Handler {
	refuse := func(w http.ResponseWriter, req *http.Request, limit, text string) {
		overUserLimit.WithLabelValues(limit).Inc()
		w.Header().Set("Retry-After", fmt.Sprint(limitRetryAfter))
		responsewriters.Error(w, req, responsewriters.V1, apierrors.NewTooManyRequests(text, limitRetryAfter))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u, ok := request.UserFrom(req.Context())
		if !ok || isProbe(req.URL.Path) {
			next.ServeHTTP(w, req)
			return
		}
		owner := identity.QuotaOwner(u, req.RemoteAddr)
		h2writer.SetOwner(req, owner)
		if c, ok := req.Context().Value(connKey{}).(*trackedConn); ok && c != nil && !l.acquireConnection(c, owner) {
			if l.isUnattributed(c) {
				w.Header().Set("Connection", "close") // sends GOAWAY over HTTP/2
			}
			refuse(w, req, "connections", openText(l.config.Connections, "connections"))
			return
		}
		if owner == "" {
			next.ServeHTTP(w, req)
			return
		}
		if info, ok := request.RequestInfoFrom(req.Context()); ok && LongRunning(req, info) {
			end, limit, text := l.acquireStream(owner, requestBytes(req, u))
			if end == nil {
				refuse(w, req, limit, text)
				return
			}
			defer h2writer.AtEnd(req, func(any) { end() })
		}
		next.ServeHTTP(w, req)
	})
}
