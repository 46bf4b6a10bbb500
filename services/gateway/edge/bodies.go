package edge

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
)

// MaxBodyBytes is the largest body of a request for a resource, kube-apiserver's.
const MaxBodyBytes = 3 << 20

const (
	// bodiesBytes bounds the bodies that are being read or waiting for their request's turn, and bodiesShare those of one owner.
	bodiesBytes = 512 << 20
	bodiesShare = 64 << 20
	// smallBody is up to which size a body is always taken: a Lease, an Event, a review.
	smallBody = 64 << 10
	// bodyPatience is how long a client may take to send a body.
	bodyPatience = 30 * time.Second
	// grownAtOnce is up to which size a body is believed to be as long as it is said to be.
	grownAtOnce = 64 << 10
)

var bodiesGauge = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_body_bytes",
	Help: "Bytes of request bodies that have been read and whose requests are not answered yet.",
})

// unbounded are the groups whose bodies are taken even where others' fill the room: what runs the cluster goes on.
var unbounded = []string{user.SystemPrivilegedGroup, user.NodesGroup, identity.ServicesGroup}

// bodies reads requests' bodies before the requests are counted as in flight: a client that sends slowly takes up what it has sent, and
// nobody's slot.
type bodies struct {
	mu     sync.Mutex
	bytes  int
	owners map[string]int
}

// readAhead has next find the whole body of those requests that buffered says are for the gateway itself. What is too large is passed on
// so: next answers it.
func (b *bodies) readAhead(next http.Handler, buffered func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body == nil || req.Body == http.NoBody || req.ContentLength == 0 || !buffered(req) {
			next.ServeHTTP(w, req)
			return
		}
		held := &heldBody{all: b}
		if u, ok := request.UserFrom(req.Context()); ok {
			held.owner, held.free = ownerOf(u), slices.ContainsFunc(u.GetGroups(), func(g string) bool { return slices.Contains(unbounded, g) })
		}
		defer held.release()
		// A client has a while to send it, not for ever. Where the connection does not take deadlines the request's own ends it.
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Now().Add(bodyPatience))
		if n := req.ContentLength; n > 0 && n <= grownAtOnce { // what is said to be larger grows as it comes
			held.data.Grow(int(n))
		}
		n, err := io.Copy(held, io.LimitReader(req.Body, MaxBodyBytes+1))
		if errors.Is(err, errBodies) {
			WriteError(w, req, schema.GroupVersion{Version: "v1"}, apierrors.NewTooManyRequests(err.Error(), 1))
			return
		}
		_ = control.SetReadDeadline(time.Time{})
		after := io.Reader(&held.data)
		if err != nil { // the client broke off; next finds out as it would by itself
			after = io.MultiReader(after, failing{err})
		}
		req.Body = &readBody{Reader: after, Closer: req.Body, data: held.data.Bytes(), whole: err == nil && n <= MaxBodyBytes}
		next.ServeHTTP(w, req)
	})
}

var errBodies = errors.New("too many bytes of request bodies are waiting, please try again later")

// heldBody is one request's body, accounted for as it comes.
type heldBody struct {
	all   *bodies
	owner string
	// free: it is not refused for want of room.
	free bool
	data bytes.Buffer
	held int
}

// Write implements io.Writer.
func (h *heldBody) Write(p []byte) (int, error) {
	b := h.all
	b.mu.Lock()
	if b.owners == nil {
		b.owners = map[string]int{}
	}
	small := h.data.Len()+len(p) <= smallBody
	full := !small && !h.free && (b.bytes+len(p) > bodiesBytes || b.owners[h.owner]+len(p) > bodiesShare)
	if !full {
		h.held += len(p)
		b.bytes += len(p)
		b.owners[h.owner] += len(p)
		bodiesGauge.Set(float64(b.bytes))
	}
	b.mu.Unlock()
	if full {
		return 0, errBodies
	}
	return h.data.Write(p)
}

func (h *heldBody) release() {
	b := h.all
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= h.held
	if b.owners[h.owner] -= h.held; b.owners[h.owner] <= 0 {
		delete(b.owners, h.owner)
	}
	bodiesGauge.Set(float64(b.bytes))
}

type readBody struct {
	io.Reader
	io.Closer
	data  []byte
	whole bool
}

// Body is a request's body where all of it has been read ahead; it must not be changed.
func Body(req *http.Request) (data []byte, ok bool) {
	b, ok := req.Body.(*readBody)
	if !ok || !b.whole {
		return nil, false
	}
	return b.data, true
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// unlimited passes the system's own services by the limit of requests in flight: what everybody is decided by is not to wait for
// everybody. A fair share of the rest is another matter.
func unlimited(limited, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if u, ok := request.UserFrom(req.Context()); ok && slices.Contains(u.GetGroups(), identity.ServicesGroup) {
			next.ServeHTTP(w, req)
			return
		}
		limited.ServeHTTP(w, req)
	})
}
