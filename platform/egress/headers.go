package egress

import (
	"net/http"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// maxHeaderBytes bounds the headers of a response. Go's default is 10 MB, and a proxied response keeps its headers
// until its body ends.
const maxHeaderBytes = 256 << 10

// LimitHeaders bounds the headers of the responses of rt to 256 KB, and returns rt. rt must be an http.Transport, or
// wrap an http.Transport, that has not sent a request yet.
func LimitHeaders(rt http.RoundTripper) http.RoundTripper {
	for inner := rt; inner != nil; {
		switch t := inner.(type) {
		case *http.Transport:
			if t != http.DefaultTransport && t.MaxResponseHeaderBytes != maxHeaderBytes { // client-go shares transports
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
