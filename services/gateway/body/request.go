// Package body reads requests' bodies, ahead of their turn and within bounds, and writes answers' bodies, compressed
// where that pays.
package body

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/services/gateway/answer"
)

// MaxBytes is the largest body of a request for a resource, kube-apiserver's.
const MaxBytes = 3 << 20

const (
	// bodiesBytes bounds the bodies that are being read or waiting for their request's turn, and bodiesShare those of
	// one owner.
	bodiesBytes = 512 << 20
	bodiesShare = 64 << 20
	// smallBody is up to which size a body is taken though others fill the room, for as long as its owner's share has
	// some: a Lease, an Event, a review. bodiesMost bounds even those.
	smallBody  = 64 << 10
	bodiesMost = 2 * bodiesBytes
	// bodyPatience is how long a client may take to send a body.
	bodyPatience = 30 * time.Second
	// afterDeadline is the extra time that a body is read after its request's deadline. The 504 comes first.
	afterDeadline = 100 * time.Millisecond
	// firstPiece is the room that a body begins with; it grows as the body comes.
	firstPiece = 4 << 10
)

var heldGauge = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_inflight_body_bytes",
	Help: "Bytes of request bodies that have been read and whose requests are not answered yet.",
})

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{heldGauge} }

// unbounded are the groups whose bodies are taken even where others' fill the room: what runs the cluster goes on.
var unbounded = []string{user.SystemPrivilegedGroup, user.NodesGroup, identity.ServicesGroup}

// Reader reads requests' bodies before the requests are counted as in flight: a client that sends slowly takes up what
// it has sent, and nobody's slot. Its zero value is ready to use.
type Reader struct {
	mu     sync.Mutex
	bytes  int
	owners map[string]int
}

// ReadAhead has next find the whole body of those requests that buffered says are for the gateway itself. What is too
// large is passed on so: next answers it. Strangers' bodies are not read: next refuses most of them without.
func (b *Reader) ReadAhead(next http.Handler, buffered func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body == nil || req.Body == http.NoBody || req.ContentLength == 0 {
			next.ServeHTTP(w, req)
			return
		}
		control := http.NewResponseController(w)
		over, timed := req.Context().Deadline()
		over = over.Add(afterDeadline)
		if timed { // net/http waits for a handler that reads an HTTP/1.1 body, also after the request was answered
			_ = control.SetReadDeadline(over)
		}
		if !buffered(req) {
			next.ServeHTTP(w, req)
			return
		}
		u, ok := request.UserFrom(req.Context())
		if ok && identity.IsAnonymous(u) {
			next.ServeHTTP(w, req)
			return
		}
		held := &heldBody{all: b}
		if ok {
			held.owner = identity.Owner(u.GetName())
			held.free = slices.ContainsFunc(u.GetGroups(), func(g string) bool { return slices.Contains(unbounded, g) })
		}
		defer held.release()
		// A client has a while to send it, not for ever. Where the connection does not take deadlines the request's own
		// ends it.
		if until := time.Now().Add(bodyPatience); !timed || until.Before(over) {
			_ = control.SetReadDeadline(until)
		}
		err := held.read(req.Body, req.ContentLength)
		if errors.Is(err, errBodies) {
			answer.Error(w, req, answer.V1, apierrors.NewTooManyRequests(err.Error(), 1))
			return
		}
		_ = control.SetReadDeadline(time.Time{})
		after := io.Reader(bytes.NewReader(held.data))
		if err != nil { // the client broke off; next finds out as it would by itself
			after = io.MultiReader(after, failing{err})
		}
		req.Body = &readBody{
			Reader: after,
			Closer: req.Body,
			data:   held.data,
			whole:  err == nil && len(held.data) <= MaxBytes,
		}
		next.ServeHTTP(w, req)
	})
}

var errBodies = errors.New("too many bytes of request bodies are waiting, please try again later")

// heldBody is one request's body, accounted for as it comes.
type heldBody struct {
	all   *Reader
	owner string
	// free: it is not refused for want of room.
	free bool
	data []byte
	held int
}

// read reads the whole body, or one byte more than is allowed. length is how long it is said to be; below 0: nobody
// says.
func (h *heldBody) read(body io.Reader, length int64) error {
	room := firstPiece
	if length >= 0 {
		room = int(min(length, firstPiece-1)) + 1 // one more, to find its end without growing
	}
	for len(h.data) <= MaxBytes {
		if len(h.data) == cap(h.data) {
			if err := h.grow(room); err != nil {
				return err
			}
			room = cap(h.data) // twice as much each time
			if length >= 0 {
				room = min(room, max(int(min(length, MaxBytes))+1-len(h.data), firstPiece))
			}
		}
		n, err := body.Read(h.data[len(h.data):cap(h.data)])
		h.data = h.data[:len(h.data)+n]
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// grow makes room for n more bytes, where there is any.
func (h *heldBody) grow(n int) error {
	n = min(n, MaxBytes+1-cap(h.data))
	if !h.hold(n) {
		return errBodies
	}
	grown := make([]byte, len(h.data), cap(h.data)+n)
	copy(grown, h.data)
	h.data = grown
	return nil
}

// hold accounts for n more bytes; false where there is no room.
func (h *heldBody) hold(n int) bool {
	b := h.all
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owners == nil {
		b.owners = map[string]int{}
	}
	most := bodiesBytes
	if h.held+n <= smallBody {
		most = bodiesMost
	}
	if n <= 0 || !h.free && (b.bytes+n > most || b.owners[h.owner]+n > bodiesShare) {
		return false
	}
	h.held += n
	b.bytes += n
	b.owners[h.owner] += n
	heldGauge.Set(float64(b.bytes))
	return true
}

func (h *heldBody) release() {
	b := h.all
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= h.held
	if b.owners[h.owner] -= h.held; b.owners[h.owner] <= 0 {
		delete(b.owners, h.owner)
	}
	heldGauge.Set(float64(b.bytes))
}

type readBody struct {
	io.Reader
	io.Closer
	data  []byte
	whole bool
}

// Read is a request's whole body, which must not be changed: what ReadAhead has read of it, or what comes now. One of
// more than MaxBytes is kube-apiserver's error.
func Read(req *http.Request) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	defer req.Body.Close()
	if data, ok := ahead(req); ok {
		return data, nil
	}
	limited := &io.LimitedReader{R: req.Body, N: MaxBytes + 1}
	var data []byte
	var err error
	if n := req.ContentLength; n > 0 && n <= MaxBytes {
		data = make([]byte, n)
		_, err = io.ReadFull(limited, data)
	} else {
		data, err = io.ReadAll(limited)
	}
	if err != nil {
		return nil, err
	}
	if limited.N <= 0 {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("limit is %d", MaxBytes))
	}
	return data, nil
}

// ahead is a request's body where all of it has been read ahead.
func ahead(req *http.Request) (data []byte, ok bool) {
	b, ok := req.Body.(*readBody)
	if !ok || !b.whole {
		return nil, false
	}
	return b.data, true
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
