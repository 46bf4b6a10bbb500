// Package body reads request bodies before requests count as in flight, within quotas, and writes response bodies,
// compressed if that saves time. It does not decode bodies.
//
// A request's goroutine owns its body. Reader.mu guards the quotas.
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
	"watershed.dev/services/gateway/responsewriters"
)

// MaxBytes is the maximum size of a resource request's body, as in kube-apiserver.
const MaxBytes = 3 << 20

const (
	// maxInflightBytes limits the bodies that are being read or whose requests are in progress. maxOwnerBytes is the
	// limit of an owner.
	maxInflightBytes = 512 << 20
	maxOwnerBytes    = 64 << 20
	// smallBody is the size up to which a body is accepted although maxInflightBytes is reached: a Lease, an Event, a
	// review. maxOwnerBytes still applies. maxSmallBytes limits even these bodies.
	smallBody     = 64 << 10
	maxSmallBytes = 2 * maxInflightBytes
	// readTimeout is how long a client may take to send a body.
	readTimeout = 30 * time.Second
	// readGracePeriod is the extra time that a body is read after its request's deadline. The 504 comes first.
	readGracePeriod = 100 * time.Millisecond
	// initialBufferBytes is the initial size of a body's buffer, which grows as the body arrives.
	initialBufferBytes = 4 << 10
)

var inflightBytes = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_inflight_body_bytes",
	Help: "Bytes of request bodies that are being read or whose requests are in progress.",
})

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{inflightBytes} }

// Reader reads bodies before the requests count as in flight. A slow client occupies the bytes it has sent, and no
// seat. The zero value is ready to use.
type Reader struct {
	mu     sync.Mutex
	bytes  int
	owners map[string]int
}

// ReadAhead reads the whole body before it calls next, for the requests that `buffered` selects. next also gets bodies
// that are too large, and responds to them. Bodies of anonymous clients are not read, because next rejects most of them
// without the body.
func (b *Reader) ReadAhead(next http.Handler, buffered func(*http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body == nil || req.Body == http.NoBody || req.ContentLength == 0 {
			next.ServeHTTP(w, req)
			return
		}
		control := http.NewResponseController(w)
		readDeadline, hasDeadline := req.Context().Deadline()
		readDeadline = readDeadline.Add(readGracePeriod)
		if hasDeadline { // net/http waits for a handler that reads an HTTP/1.1 body, even after the response
			setReadDeadline(req, control, readDeadline)
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
		buffer := &bodyBuffer{reader: b}
		if ok {
			buffer.owner = identity.Owner(u.GetName())
			// A node may be compromised, so it has the bound of an owner.
			buffer.anyTotal = identity.IsPriority(u)
			buffer.anyOwned = buffer.anyTotal && !slices.Contains(u.GetGroups(), user.NodesGroup)
		}
		defer buffer.release()
		// A client may not send its body forever. If the connection has no deadlines, the request's own deadline ends
		// it.
		if deadline := time.Now().Add(readTimeout); !hasDeadline || deadline.Before(readDeadline) {
			setReadDeadline(req, control, deadline)
		}
		err := buffer.read(req.Body, req.ContentLength)
		if errors.Is(err, errQuotaExceeded) {
			responsewriters.Error(w, req, responsewriters.V1, apierrors.NewTooManyRequests(err.Error(), 1))
			return
		}
		setReadDeadline(req, control, time.Time{})
		rest := io.Reader(bytes.NewReader(buffer.data))
		if err != nil { // the client disconnected; next sees the same error
			rest = io.MultiReader(rest, errorReader{err})
		}
		req.Body = &bufferedBody{
			Reader:   rest,
			Closer:   req.Body,
			data:     buffer.data,
			complete: err == nil && len(buffer.data) <= MaxBytes,
		}
		next.ServeHTTP(w, req)
	})
}

// setReadDeadline sets the deadline of reads of the body, until req ends. A handler may outlive its request after a
// timeout. HTTP/2's writer has no stream then, and panics; req may end meanwhile.
func setReadDeadline(req *http.Request, control *http.ResponseController, deadline time.Time) {
	if req.Context().Err() != nil {
		return
	}
	defer func() { _ = recover() }()
	_ = control.SetReadDeadline(deadline)
}

var errQuotaExceeded = errors.New("too many bytes of request bodies are in flight, please try again later")

// bodyBuffer is a request's body. Its bytes are accounted for as they arrive.
type bodyBuffer struct {
	reader *Reader
	owner  string
	// anyTotal: the bound of all owners does not apply, because the user runs the cluster. anyOwned: the bound of the
	// owner does not apply.
	anyTotal, anyOwned bool
	data               []byte
	reserved           int
}

// read reads the whole body, or one byte more than MaxBytes. length is the Content-Length, or negative if unknown. It
// is only a hint for the size of the buffer.
func (h *bodyBuffer) read(body io.Reader, length int64) error {
	size := initialBufferBytes
	if length >= 0 {
		size = int(min(length, initialBufferBytes-1)) + 1 // an extra byte, to find the end without growing
	}
	for len(h.data) <= MaxBytes {
		if len(h.data) == cap(h.data) {
			if err := h.grow(size); err != nil {
				return err
			}
			size = cap(h.data) // doubles each time
			if length >= 0 {
				size = min(size, max(int(min(length, MaxBytes))+1-len(h.data), initialBufferBytes))
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

// grow enlarges the buffer by n bytes if the quota allows it.
func (h *bodyBuffer) grow(n int) error {
	n = min(n, MaxBytes+1-cap(h.data))
	if !h.reserve(n) {
		return errQuotaExceeded
	}
	grown := make([]byte, len(h.data), cap(h.data)+n)
	copy(grown, h.data)
	h.data = grown
	return nil
}

// reserve accounts for n more bytes. It returns false if a quota is exceeded.
func (h *bodyBuffer) reserve(n int) bool {
	b := h.reader
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owners == nil {
		b.owners = map[string]int{}
	}
	limit := maxInflightBytes
	if h.reserved+n <= smallBody {
		limit = maxSmallBytes
	}
	if n <= 0 || !h.anyTotal && b.bytes+n > limit || !h.anyOwned && b.owners[h.owner]+n > maxOwnerBytes {
		return false
	}
	h.reserved += n
	b.bytes += n
	b.owners[h.owner] += n
	inflightBytes.Set(float64(b.bytes))
	return true
}

func (h *bodyBuffer) release() {
	b := h.reader
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bytes -= h.reserved
	if b.owners[h.owner] -= h.reserved; b.owners[h.owner] <= 0 {
		delete(b.owners, h.owner)
	}
	inflightBytes.Set(float64(b.bytes))
}

type bufferedBody struct {
	io.Reader
	io.Closer
	data     []byte
	complete bool
}

// Read returns a request's whole body, which must not be changed: the body that ReadAhead read, or it reads it now.
// More than MaxBytes is kube-apiserver's error.
func Read(req *http.Request) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	defer req.Body.Close()
	if data, ok := bufferedData(req); ok {
		return data, nil
	}
	limited := &io.LimitedReader{R: req.Body, N: MaxBytes + 1}
	data, err := io.ReadAll(limited) // the Content-Length of a body that does not arrive allocates nothing
	if err != nil {
		return nil, err
	}
	if limited.N <= 0 {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("limit is %d", MaxBytes))
	}
	return data, nil
}

// bufferedData returns a request's body if ReadAhead read all of it.
func bufferedData(req *http.Request) (data []byte, ok bool) {
	b, ok := req.Body.(*bufferedBody)
	if !ok || !b.complete {
		return nil, false
	}
	return b.data, true
}

type errorReader struct{ err error }

func (f errorReader) Read([]byte) (int, error) { return 0, f.err }
