package gateway

import (
	"context"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/console"
	"watershed.dev/services/gateway/proxy"
	"watershed.dev/services/gateway/responsewriters"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/server"
	"watershed.dev/services/gateway/watch"
)

// router returns the handler for requests for resources.
func (g *Service) router(proxyHandler *proxy.Handler) *routing.Router {
	c, d := g.config, &g.deps
	memoryQuota, rateLimiter, inflightQuota := new(watch.MemoryQuota), new(watch.RateLimiter), new(watch.InflightQuota)
	hub := func(source watch.Watcher) *watch.Hub {
		return &watch.Hub{
			Client:        source,
			Discovery:     g.discovery,
			Config:        &c.Watch,
			Revision:      g.revision,
			MemoryQuota:   memoryQuota,
			RateLimiter:   rateLimiter,
			InflightQuota: inflightQuota,
			Usages:        g.usages,
		}
	}
	tier, internal := hub(d.Watch), hub(d.InternalWatch)
	tier.Turns = g.turns
	if g.usages != nil {
		g.usages.Hubs = []*watch.Hub{tier, internal}
	}
	lists := func(perOwner, queue int) *routing.ListGroups {
		return routing.NewListGroups(func() *coalesce.Group[[]byte] {
			return &coalesce.Group[[]byte]{
				Limit:    maxFallbackLists,
				PerOwner: perOwner,
				Queue:    queue,
				Timeout:  c.Server.RequestTimeout,
			}
		})
	}
	r := &routing.Router{
		Discovery:         g.discovery,
		AdmissionRules:    g.admissionRules,
		Objects:           d.Objects,
		Tier:              routing.Source{Lists: d.Watch, Watches: tier},
		Internal:          routing.Source{Lists: d.InternalWatch, Watches: internal},
		Lists:             lists(maxOwnFallbackLists, maxFallbackQueue),
		PriorityLists:     lists(0, maxPriorityFallbackQueue),
		Admission:         d.Admission,
		Authn:             d.Authn,
		Authz:             d.Authz,
		Authorizer:        g.authz,
		Proxy:             proxyHandler,
		MinRequestTimeout: time.Duration(c.MinRequestTimeout) * time.Second,
		Stopping:          g.server.ShutdownStagger,
		Traffic:           &g.traffic,
		Slow:              g.slow,
	}
	return r
}

// mux returns a handler that sends a request to aggregated servers, resources, discovery, or the gateway's own pages.
func (g *Service) mux(router *routing.Router) http.Handler {
	pages := http.NewServeMux()
	page(pages, "/version", "application/json", writeVersion)
	pages.HandleFunc("/openapi", responsewriters.NotFound) // ServeMux would redirect to /openapi/
	pages.Handle("/openapi/", g.views.openapi)
	page(pages, "/.well-known/openid-configuration", "application/json", g.issuerDocument)
	page(pages, "/openid/v1/jwks", "application/jwk-set+json", g.issuerDocument)
	if g.config.Profiling {
		telemetry.Profiles(pages)
		installDebugFlags(pages)
		if g.config.ContentionProfiling {
			runtime.SetBlockProfileRate(1)
		}
		pages.Handle("/metrics", g.withReports(legacyregistry.HandlerWithReset()))
		slis.SLIMetricsWithReset{}.Install(pages)
	} else { // as kube-apiserver
		pages.Handle("/metrics", g.withReports(legacyregistry.Handler()))
		slis.SLIMetrics{}.Install(pages)
	}
	if g.config.FlowControl.Enabled {
		pages.HandleFunc("/debug/api_priority_and_fairness", responsewriters.NotFound)
		pages.HandleFunc("/debug/api_priority_and_fairness/", func(w http.ResponseWriter, req *http.Request) {
			g.flowControl.ServeHTTP(w, req)
		})
	}
	if g.config.Console && g.deps.Report != nil {
		c := &console.Console{Read: g.consoleCluster}
		pages.Handle(console.Root, c)
		pages.Handle(console.Root+"/", c)
	}
	g.health = g.checks()
	paths := installStatusz(pages, slices.Concat(ownPaths, g.installHealth(pages), g.installFlagz(pages)))
	pages.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/" && req.URL.Path != "/index.html" {
			responsewriters.NotFound(w, req)
			return
		}
		g.index(w, paths)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		switch group, version := groupVersion(req.URL.Path); {
		case group != "" && g.views.apiServices.Handles(group, version):
			g.views.apiServices.Serve(w, req, group, version)
		case ok && info.IsResourceRequest && (under(req.URL.Path, "/api") || under(req.URL.Path, "/apis")):
			router.ServeHTTP(w, req)
		case under(req.URL.Path, "/api"), under(req.URL.Path, "/apis"):
			g.views.discovery.ServeHTTP(w, req)
		default:
			servePage(pages, w, req)
		}
	})
}

// revision returns the current revision of the etcd with an event log, from registry.
func (g *Service) revision(ctx context.Context, log string) (int64, error) {
	r, err := g.deps.Source.Revision(ctx, &registryv1.RevisionRequest{Log: log})
	return r.GetRevision(), err
}

// servedLocally reports whether this system serves the request's resource and the request is not long-running. Such a
// request is no watch, and no connection to a kubelet, pod, service or node.
func (g *Service) servedLocally(req *http.Request) bool {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || !info.IsResourceRequest || server.LongRunning(req, info) {
		return false
	}
	group, version := groupVersion(req.URL.Path)
	return group == "" || !g.views.apiServices.Handles(group, version)
}

// groupVersion returns the group and version of a path /apis/<group>/<version>. Both are empty for another path.
func groupVersion(path string) (group, version string) {
	rest, ok := strings.CutPrefix(path, "/apis/")
	if !ok {
		return "", ""
	}
	group, rest, ok = strings.Cut(rest, "/")
	if version, _, _ = strings.Cut(rest, "/"); !ok || version == "" {
		return "", ""
	}
	return group, version
}

func under(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

func (g *Service) issuerDocument(w http.ResponseWriter, req *http.Request) {
	d, err := g.deps.Authn.IssuerDocument(req.Context(), &authnv1.IssuerDocumentRequest{
		Path:            strings.TrimSuffix(req.URL.Path, "/"),
		ExternalAddress: g.external,
	})
	switch {
	case status.Code(err) == codes.NotFound:
		responsewriters.NotFound(w, req)
		return
	case err != nil:
		responsewriters.Error(w, req, responsewriters.V1, rpc.FromStatus(err))
		return
	}
	w.Header().Set("Content-Type", d.ContentType)
	w.Header().Set("Cache-Control", fmt.Sprintf("public, max-age=%d", d.MaxAgeSeconds))
	_, _ = w.Write(d.Body)
}
