// Package discovery serves the discovery documents: /api, /apis, each group and version, and the aggregated documents.
// It does not cache discovery of aggregated servers: package aggregation does. Requests use it from any goroutine.
package discovery

import (
	"cmp"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"watershed.dev/platform/discovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/responsewriters"
)

// Handler serves the discovery documents of the newest view.
type Handler struct {
	// Address is the server address in the response to /api, as host:port.
	Address string
	// Aggregated caches the discovery of aggregated servers.
	Aggregated *aggregation.DiscoveryManager
	current    atomic.Pointer[lazy]
}

// documents are the discovery documents of a view.
type documents struct {
	view         *discovery.View
	versions     map[string][]metav1.APIResource
	groups       metav1.APIGroupList
	legacy, apis http.Handler
}

// Set replaces the view. Its documents are built at the first request.
func (h *Handler) Set(v *discovery.View) {
	h.current.Store(&lazy{make: sync.OnceValue(func() *documents { return h.documents(v) })})
}

// lazy builds the documents of a view at most once.
type lazy struct{ make func() *documents }

func (h *Handler) documents(v *discovery.View) *documents {
	d := &documents{view: v, versions: map[string][]metav1.APIResource{}}
	custom := map[string]bool{} // group versions of custom resources
	for _, e := range v.Resources {
		if e.NotEstablished {
			continue
		}
		gv := groupVersion(e.Resource.Group, e.Resource.Version)
		custom[gv] = e.Unstructured
		d.versions[gv] = append(d.versions[gv], discovery.ToMetaV1(e))
	}
	remote := map[schema.GroupVersion]bool{}
	for _, r := range v.ApiServices {
		remote[schema.GroupVersion{Group: r.Group, Version: r.Version}] = true
	}
	legacy, apis := aggregated.NewResourceManager("api"), aggregated.NewResourceManager("apis")
	d.groups.TypeMeta = metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}
	d.groups.Groups = plainGroups(v.Groups)
	for i, g := range v.Groups {
		manager := apis
		if g.Name == "" {
			manager = legacy
		}
		for j, version := range g.Versions {
			gv := metav1.GroupVersion{Group: g.Name, Version: version}
			if remote[schema.GroupVersion(gv)] {
				discoveryVersion := apidiscoveryv2.APIVersionDiscovery{
					Version:   version,
					Freshness: apidiscoveryv2.DiscoveryFreshnessStale,
				}
				if discovered := h.Aggregated.Lookup(schema.GroupVersion(gv)); discovered != nil {
					discoveryVersion.Resources = discovered.Resources
					if !discovered.Stale {
						discoveryVersion.Freshness = apidiscoveryv2.DiscoveryFreshnessCurrent
					}
				}
				manager.AddGroupVersion(g.Name, discoveryVersion)
				manager.SetGroupVersionPriority(gv, 100000-i, 1000-j)
				continue
			}
			converted, err := genericapi.ConvertGroupVersionIntoToDiscovery(d.versions[groupVersion(g.Name, version)])
			if err != nil {
				continue
			}
			if custom[groupVersion(g.Name, version)] { // discovery of custom resources has full response kinds
				fillResponseKinds(converted, gv)
			}
			manager.AddGroupVersion(g.Name, apidiscoveryv2.APIVersionDiscovery{
				Version:   version,
				Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent,
				Resources: converted,
			})
			manager.SetGroupVersionPriority(gv, 100000-i, 1000-j) // priorities keep the view's order
		}
	}
	d.legacy = aggregated.WrapAggregatedDiscoveryToHandler(http.HandlerFunc(h.versions), legacy, nil)
	d.apis = aggregated.WrapAggregatedDiscoveryToHandler(http.HandlerFunc(d.allGroups), apis, nil)
	return d
}

// fillResponseKinds sets the group and version of response kinds that have neither.
func fillResponseKinds(resources []apidiscoveryv2.APIResourceDiscovery, gv metav1.GroupVersion) {
	fill := func(k *metav1.GroupVersionKind) {
		if k != nil && k.Group == "" && k.Version == "" {
			k.Group, k.Version = gv.Group, gv.Version
		}
	}
	for i := range resources {
		fill(resources[i].ResponseKind)
		for j := range resources[i].Subresources {
			fill(resources[i].Subresources[j].ResponseKind)
		}
	}
}

// ServeHTTP implements http.Handler for the paths above resources.
func (h *Handler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	current := h.current.Load()
	if current == nil {
		http.Error(w, "the API is starting", http.StatusServiceUnavailable)
		return
	}
	d := current.make()
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	// Only pages of kube-apiserver's web framework check the method.
	framework := parts[0] == "api" || len(parts) == 3 && d.view.BuiltIn(parts[1]) ||
		len(parts) == 2 && parts[1] == apiregistrationv1.GroupName // no handler of APIServices serves it
	if framework && req.Method != http.MethodGet {
		responsewriters.Error(w, req, responsewriters.V1, responsewriters.MethodNotAllowed)
		return
	}
	switch {
	case len(parts) == 1 && parts[0] == "api":
		d.legacy.ServeHTTP(w, req)
	case req.URL.Path == "/apis/": // kube-apiserver has aggregated discovery only without the slash
		d.allGroups(w, req)
	case len(parts) == 1 && parts[0] == "apis":
		d.apis.ServeHTTP(w, req)
	case len(parts) == 2 && parts[0] == "api":
		d.resources(w, req, parts[1])
	case len(parts) == 2:
		for i := range d.groups.Groups {
			if d.groups.Groups[i].Name == parts[1] {
				g := d.groups.Groups[i]
				g.TypeMeta = metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}
				responsewriters.WriteObject(w, req, responsewriters.Codecs, &g)
				return
			}
		}
		responsewriters.NotFound(w, req)
	case len(parts) == 3 && parts[0] == "apis":
		d.resources(w, req, parts[1]+"/"+parts[2])
	default:
		responsewriters.NotFound(w, req)
	}
}

func (d *documents) resources(w http.ResponseWriter, req *http.Request, gv string) {
	resources, ok := d.versions[gv]
	group, _, _ := strings.Cut(gv, "/")
	switch {
	case !ok && (d.view.BuiltIn(group) || !strings.Contains(gv, "/")):
		responsewriters.Error(w, req, responsewriters.V1, responsewriters.PageNotFound)
		return
	case !ok:
		responsewriters.NotFound(w, req)
		return
	}
	list := metav1.APIResourceList{
		TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: gv,
		APIResources: resources,
	}
	if gv == "v1" { // without CBOR, for which kube-apiserver breaks the response off
		list.APIVersion = ""
		responsewriters.WriteUnversioned(w, req, &list)
		return
	}
	codecs := responsewriters.Codecs
	if d.view.BuiltIn(group) {
		codecs = responsewriters.ResourceCodecs()
	}
	responsewriters.WriteObject(w, req, codecs, &list)
}

func (h *Handler) versions(w http.ResponseWriter, req *http.Request) {
	host, port, err := net.SplitHostPort(h.Address)
	address := h.Address
	if err == nil && (host == "" || host == "0.0.0.0" || host == "::") {
		address = net.JoinHostPort(localAddress(req), port)
	}
	responsewriters.WriteUnversioned(w, req, &metav1.APIVersions{
		TypeMeta: metav1.TypeMeta{Kind: "APIVersions"},
		Versions: []string{"v1"},
		ServerAddressByClientCIDRs: []metav1.ServerAddressByClientCIDR{{ClientCIDR: "0.0.0.0/0",
			ServerAddress: address}},
	})
}

func localAddress(req *http.Request) string {
	if a, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		if host, _, err := net.SplitHostPort(a.String()); err == nil {
			return host
		}
	}
	return "127.0.0.1"
}

func (d *documents) allGroups(w http.ResponseWriter, req *http.Request) {
	groups := d.groups
	responsewriters.WriteObject(w, req, responsewriters.Codecs, &groups)
}

func groupVersion(group, version string) string {
	if group == "" {
		return version
	}
	return group + "/" + version
}

// plainGroups returns the groups of /apis without aggregated discovery, in kube-aggregator's order: by priority, then
// by the name of the group's first APIService. These names begin with the version.
func plainGroups(all []*registryv1.Group) []metav1.APIGroup {
	first := func(g *registryv1.Group) string { return slices.Min(g.Versions) + "." + g.Name }
	sorted := slices.DeleteFunc(slices.Clone(all), func(g *registryv1.Group) bool {
		return g.Name == "" || len(g.Versions) == 0
	})
	slices.SortStableFunc(sorted, func(a, b *registryv1.Group) int {
		return cmp.Or(cmp.Compare(b.GroupPriorityMinimum, a.GroupPriorityMinimum), cmp.Compare(first(a), first(b)))
	})
	groups := []metav1.APIGroup{}
	for _, g := range sorted {
		groups = append(groups, apiGroup(g))
	}
	return groups
}

func apiGroup(g *registryv1.Group) metav1.APIGroup {
	out := metav1.APIGroup{Name: g.Name}
	for _, v := range g.Versions {
		out.Versions = append(out.Versions, metav1.GroupVersionForDiscovery{
			GroupVersion: groupVersion(g.Name, v),
			Version:      v,
		})
	}
	out.PreferredVersion = out.Versions[0]
	return out
}
