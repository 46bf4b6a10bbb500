package egress

import (
	"net/http"
	"sync"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// maxHeaderBytes bounds the headers of a response. Go's default is 10 MB, and a proxied response keeps its headers
// until its body ends.
const maxHeaderBytes = 256 << 10

// LimitHeaders bounds the headers of the responses of rt to 256 KB, and returns rt. Call it as ChangeTransport.
func LimitHeaders(rt http.RoundTripper) http.RoundTripper {
	return ChangeTransport(rt, func(t *http.Transport) {
		if t.MaxResponseHeaderBytes != maxHeaderBytes {
			t.MaxResponseHeaderBytes = maxHeaderBytes
		}
	})
}

// changing is held by ChangeTransport, because several callers may share a transport.
var changing sync.Mutex

// ChangeTransport calls change with the http.Transport behind rt, and returns rt. Call it when client-go's transport
// has returned rt. client-go shares transports, and a changed transport may have sent a request: change must not write
// to it again. http.DefaultTransport does not change.
func ChangeTransport(rt http.RoundTripper, change func(*http.Transport)) http.RoundTripper {
	changing.Lock()
	defer changing.Unlock()
	for inner := rt; inner != nil; {
		switch t := inner.(type) {
		case *http.Transport:
			if t != http.DefaultTransport {
				change(t)
			}
			return rt
		case utilnet.RoundTripperWrapper:
			inner = t.WrappedRoundTripper()
		default:
			return rt
		}
	}
	return rt
}
