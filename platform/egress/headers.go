package egress

import (
	"net/http"
	"sync"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// maxHeaderBytes bounds the headers of a response. Go's default is 10 MB, and a proxied response keeps its headers
// until its body ends.
const maxHeaderBytes = 256 << 10

// limiting is held by LimitHeaders, because several callers may share a transport.
var limiting sync.Mutex

// LimitHeaders bounds the headers of the responses of rt to 256 KB, and returns rt. Call it when client-go's transport
// has returned rt. client-go shares transports, and a transport that has sent a request already has the bound.
// http.DefaultTransport keeps its bound.
func LimitHeaders(rt http.RoundTripper) http.RoundTripper {
	limiting.Lock()
	defer limiting.Unlock()
	for inner := rt; inner != nil; {
		switch t := inner.(type) {
		case *http.Transport:
			if t != http.DefaultTransport && t.MaxResponseHeaderBytes != maxHeaderBytes {
				t.MaxResponseHeaderBytes = maxHeaderBytes
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
