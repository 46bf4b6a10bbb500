package process

import (
	"context"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/guard"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
)

// Metrics are those of the services that run in this process, of what they share, and of the libraries that they are
// made of. It is called once in a process.
func Metrics(all ...Service) prometheus.Gatherer {
	r := prometheus.NewRegistry()
	r.MustRegister(version.Metrics()...)
	r.MustRegister(rpc.Metrics()...)
	r.MustRegister(guard.Metrics()...)
	for _, s := range all {
		r.MustRegister(s.Collectors()...)
	}
	return prometheus.Gatherers{r, legacyregistry.DefaultGatherer}
}

// Pages are a service's own pages of the debug address.
func Pages(s Service) map[string]http.Handler {
	out := map[string]http.Handler{"/healthz": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := s.Ready().Err()
		if c, ok := s.(interface{ Check(context.Context) error }); err == nil && ok {
			err = c.Check(r.Context())
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, "ok")
	})}
	if h, ok := s.(http.Handler); ok {
		out["/"] = h
	}
	return out
}
