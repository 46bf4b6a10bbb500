package aggregation

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapi "k8s.io/apiserver/pkg/endpoints"

	"watershed.dev/platform/egress"
)

const (
	// refreshInterval is the period of discovery, as in kube-aggregator.
	refreshInterval = time.Minute
	fetchTimeout    = 5 * time.Second
	// maxConcurrentFetches is the number of concurrent fetches, because each may use the limits below.
	maxConcurrentFetches = 4
)

// responseLimit bounds a server's response in bytes and in JSON values, because three bytes of JSON become a struct of
// hundreds of bytes. kube-aggregator has no such limit.
type responseLimit struct{ bytes, values int }

var (
	// discoveryLimit is 25 times the size of kube-apiserver's own aggregated discovery.
	discoveryLimit = responseLimit{4 << 20, 50_000}
	// openAPILimit is three times the size of kube-apiserver's own OpenAPI v2, which has all groups.
	openAPILimit = responseLimit{16 << 20, 200_000}
)

// check returns an error for a response that exceeds the limit.
func (b responseLimit) check(path string, data []byte) error {
	if len(data) > b.bytes {
		return fmt.Errorf("%s is larger than %d bytes", path, b.bytes)
	}
	if egress.ValuesOf(data) > b.values {
		return fmt.Errorf("%s has more than %d values", path, b.values)
	}
	return nil
}

// aggregator is the user of discovery requests, under kube-aggregator's name.
var aggregator = &user.DefaultInfo{Name: "system:kube-aggregator", Groups: []string{"system:masters"}}

// DiscoveryManager caches the discovery of aggregated servers. The cache entry of a group version has these states:
//
//	absent ──► current ◄──► stale
//
//	absent   no fetch has finished, or the APIService was deleted.
//	current  the last fetch succeeded.
//	stale    the last fetch failed. Resources and documents of the last success remain, if any.
type DiscoveryManager struct {
	proxy   *Proxy
	changed func()
	wake    chan struct{}

	mu     sync.Mutex
	cached map[schema.GroupVersion]*CachedDiscovery
}

// NewDiscoveryManager returns a manager for p's servers. It calls changed after a server's discovery or documents have
// changed.
func NewDiscoveryManager(p *Proxy, changed func()) *DiscoveryManager {
	return &DiscoveryManager{proxy: p, changed: changed, wake: make(chan struct{}, 1)}
}

// CachedDiscovery is the discovery of a group version, as its server sent it.
type CachedDiscovery struct {
	// Resources is nil if the server has never responded.
	Resources []apidiscoveryv2.APIResourceDiscovery
	// Stale is set if the last fetch failed.
	Stale bool
	// OpenAPIPaths maps the root paths of the server's v3 documents to their URLs: the paths of the group and of its
	// versions. It is nil if the server has no v3 documents.
	OpenAPIPaths map[string]string
	// OpenAPIV2 is the server's v2 document in JSON, or nil. It covers all of the server's paths.
	OpenAPIV2 []byte
	// OpenAPIV2Digest is the hash of OpenAPIV2. It is stored because requests for a document compare it, and a document
	// has up to 16 MB.
	OpenAPIV2Digest string
	hash            string
}

// RefreshSoon makes Run refresh without delay, because the servers have changed.
func (m *DiscoveryManager) RefreshSoon() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run refreshes at each interval and after RefreshSoon, until ctx ends.
func (m *DiscoveryManager) Run(ctx context.Context) {
	m.RefreshSoon()
	tick := time.NewTicker(refreshInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-m.wake:
		}
		m.refresh(ctx)
	}
}

// refresh fetches from all servers, some in parallel, and publishes each response when it arrives.
func (m *DiscoveryManager) refresh(ctx context.Context) {
	servers := *m.proxy.servers.Load()
	m.mu.Lock()
	gone := false
	for gv := range m.cached {
		if servers[gv] == nil {
			delete(m.cached, gv)
			gone = true
		}
	}
	m.mu.Unlock()
	if gone {
		m.changed()
	}
	var wg sync.WaitGroup
	turns := make(chan struct{}, maxConcurrentFetches)
	for gv, s := range servers {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			if m.refreshServer(ctx, gv, s) {
				m.changed()
			}
		})
	}
	wg.Wait()
}

// refreshServer fetches discovery and documents of a server, and reports whether the cache entry has changed. The
// entry keeps the old content of anything that cannot be fetched. As in kube-aggregator, the documents do not depend
// on discovery.
func (m *DiscoveryManager) refreshServer(ctx context.Context, gv schema.GroupVersion, s *server) bool {
	before, now := m.Lookup(gv), &CachedDiscovery{}
	if before != nil {
		*now = *before
	}
	resources, err := s.fetchDiscovery(ctx, gv)
	if now.Stale = err != nil; now.Stale {
		slog.Debug("Aggregated server's discovery failed", "groupVersion", gv, "error", err)
	} else {
		now.Resources = resources
	}
	if !errors.Is(err, context.DeadlineExceeded) { // a server that hangs delays the others by this timeout only
		if paths := s.fetchOpenAPIPaths(ctx, gv.Group); paths != nil {
			now.OpenAPIPaths = paths
		}
		if document := s.fetchDocument(ctx, "/openapi/v2", openAPILimit); document != nil {
			now.OpenAPIV2 = document
		}
	}
	data, err := json.Marshal([]any{now.Resources, now.OpenAPIPaths})
	if err != nil {
		return false
	}
	now.OpenAPIV2Digest = digest(now.OpenAPIV2)
	now.hash = digest(data) + " " + now.OpenAPIV2Digest
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cached == nil {
		m.cached = map[schema.GroupVersion]*CachedDiscovery{}
	}
	m.cached[gv] = now
	return before == nil || before.hash != now.hash || before.Stale != now.Stale
}

func digest(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

// fetchDocument returns a document of the server in JSON, or nil.
func (s *server) fetchDocument(ctx context.Context, path string, limit responseLimit) []byte {
	data, _, err := s.get(ctx, path, "application/json", limit)
	if err != nil || !json.Valid(data) || !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		return nil
	}
	return data
}

// maxDocumentURL bounds the URL of a v3 document in a server's index, in bytes.
const maxDocumentURL = 1 << 10

// fetchOpenAPIPaths returns the root paths and URLs of the server's v3 documents of a group, or nil. It omits other
// roots, and URLs that are not the documents': clients and admission follow the URLs, and a server must not
// publish the documents of other groups.
func (s *server) fetchOpenAPIPaths(ctx context.Context, group string) map[string]string {
	var index struct {
		Paths map[string]struct {
			ServerRelativeURL string `json:"serverRelativeURL"`
		} `json:"paths"`
	}
	data := s.fetchDocument(ctx, "/openapi/v3", discoveryLimit)
	if data == nil || json.Unmarshal(data, &index) != nil {
		return nil
	}
	paths := map[string]string{}
	for root, document := range index.Paths {
		location := document.ServerRelativeURL
		version, ofGroup := strings.CutPrefix(root, "apis/"+group+"/")
		if root != "apis/"+group && (!ofGroup || version == "" || strings.Contains(version, "/")) ||
			len(location) > maxDocumentURL {
			continue
		}
		u, err := url.Parse(location)
		if err == nil && *u == (url.URL{Path: "/openapi/v3/" + root, RawQuery: u.RawQuery}) {
			paths[root] = location
		}
	}
	return paths
}

// Lookup returns the cached discovery of a group version, or nil.
func (m *DiscoveryManager) Lookup(gv schema.GroupVersion) *CachedDiscovery {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cached[gv]
}

// Err returns an error if a server's discovery has never been fetched. A failed fetch counts, because the server is
// stale then.
func (m *DiscoveryManager) Err() error {
	for _, gv := range m.GroupVersions() {
		if m.Lookup(gv) == nil {
			return fmt.Errorf("the discovery of %s has not been fetched yet", gv)
		}
	}
	return nil
}

// fetchDiscovery fetches a server's resources, in the aggregated form or else in the old form. Without an error they
// are not nil, because nil means that the server has never responded.
func (s *server) fetchDiscovery(ctx context.Context,
	gv schema.GroupVersion) ([]apidiscoveryv2.APIResourceDiscovery, error) {
	const accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
		"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
	data, contentType, err := s.get(ctx, "/apis", accept, discoveryLimit)
	if err == nil && strings.Contains(contentType, "APIGroupDiscoveryList") {
		var list apidiscoveryv2.APIGroupDiscoveryList
		if err := json.Unmarshal(data, &list); err != nil {
			return nil, err
		}
		for _, g := range list.Items {
			for _, v := range g.Versions {
				if g.Name == gv.Group && v.Version == gv.Version {
					setResponseKinds(v.Resources)
					return append([]apidiscoveryv2.APIResourceDiscovery{}, v.Resources...), nil
				}
			}
		}
		return nil, fmt.Errorf("aggregated discovery does not contain %s", gv)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	data, _, err = s.get(ctx, "/apis/"+gv.String(), "application/json", discoveryLimit)
	if err != nil {
		return nil, err
	}
	var list metav1.APIResourceList
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, err
	}
	if list.GroupVersion != gv.String() {
		return nil, fmt.Errorf("discovery is for %q, want %s", list.GroupVersion, gv)
	}
	resources, err := genericapi.ConvertGroupVersionIntoToDiscovery(list.APIResources)
	return append([]apidiscoveryv2.APIResourceDiscovery{}, resources...), err
}

// setResponseKinds sets the kinds that the server omits to empty kinds, as kube-apiserver does. client-go 0.26.0 to
// 0.26.3 panics without them (kubernetes issue 118361).
func setResponseKinds(resources []apidiscoveryv2.APIResourceDiscovery) {
	for i := range resources {
		r := &resources[i]
		r.ResponseKind = cmp.Or(r.ResponseKind, new(metav1.GroupVersionKind))
		for j := range r.Subresources {
			s := &r.Subresources[j]
			s.ResponseKind = cmp.Or(s.ResponseKind, new(metav1.GroupVersionKind))
		}
	}
}

// get fetches a path of the server as the user aggregator. kube-apiserver fetches discovery also from a server that is
// not available. Here, forty such servers that hang would delay the start of a gateway, and other servers, by 50 s.
func (s *server) get(ctx context.Context, path, accept string,
	limit responseLimit) (data []byte, contentType string, err error) {
	if !s.Available || len(s.Addresses) == 0 || s.err != nil {
		return nil, "", fmt.Errorf("%s.%s is not available", s.Version, s.Group)
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	u := s.urlFor(path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Accept", accept)
	resp, err := withUser(aggregator, s.transport).RoundTrip(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, "", fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	data, err = io.ReadAll(io.LimitReader(resp.Body, int64(limit.bytes)+1))
	if err == nil {
		err = limit.check(path, data)
	}
	return data, resp.Header.Get("Content-Type"), err
}

// GroupVersions returns the group versions of aggregated servers, sorted.
func (m *DiscoveryManager) GroupVersions() []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(*m.proxy.servers.Load()), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	})
}
