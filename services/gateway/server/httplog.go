package server

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/httplog"

	"watershed.dev/platform/telemetry"
	"watershed.dev/services/gateway/h2writer"
)

// httplogVerbosity is the verbosity of upstream's line of a request (k8s.io/apiserver/pkg/server/httplog). With
// --vmodule=httplog=3 every request is logged, without the other lines of this verbosity.
const httplogVerbosity = 3

// withHTTPLogging logs each request when it ends, in upstream's line, with the size of the response's body.
func withHTTPLogging(h http.Handler) http.Handler {
	logged := genericfilters.WithHTTPLogging(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		count := &byteCounter{ResponseWriter: w}
		defer func() {
			if s := h2writer.StreamFrom(req); s != nil {
				count.bytes += s.Written()
			}
			httplog.AddKeyValue(req.Context(), "bytes", count.bytes)
		}()
		h.ServeHTTP(responsewriter.WrapForHTTP1Or2(count), req)
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if telemetry.Verbose(httplogVerbosity) {
			logged.ServeHTTP(w, req)
			return
		}
		h.ServeHTTP(w, req)
	})
}

// withLoggedUser adds the authenticated user to the line of a request.
func withLoggedUser(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if telemetry.Verbose(httplogVerbosity) {
			if u, ok := request.UserFrom(req.Context()); ok {
				httplog.AddKeyValue(req.Context(), "user", u.GetName())
			}
		}
		h.ServeHTTP(w, req)
	})
}

// byteCounter counts the bytes of a response's body.
type byteCounter struct {
	http.ResponseWriter
	bytes int64
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (c *byteCounter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// Write implements http.ResponseWriter.
func (c *byteCounter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.bytes += int64(n)
	return n, err
}
