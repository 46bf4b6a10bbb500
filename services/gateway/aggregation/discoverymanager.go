package aggregation

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
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
	// refreshInterval is how often a server is asked what it serves, kube-aggregator's.
	refreshInterval = time.Minute
	fetchTimeout    = 5 * time.Second
	// maxConcurrentFetches is how many servers are read at a time: each may fill the bounds below.
	maxConcurrentFetches = 4
)

// responseLimit is how large a server's answer may be: in bytes, and in JSON values, because three bytes of JSON become a
// struct of hundreds. kube-aggregator has no such bound.
type responseLimit struct{ bytes, values int }

var (
	// discoveryLimit is 25 times what kube-apiserver itself lists in aggregated discovery.
	discoveryLimit = responseLimit{4 << 20, 50_000}
	// openAPILimit is three times kube-apiserver's own OpenAPI v2, which has all groups.
	openAPILimit = responseLimit{16 << 20, 200_000}
)

// check fails for an answer that exceeds the bound.
func (b responseLimit) check(path string, data []byte) error {
	if len(data) > b.bytes {
		return fmt.Errorf("%s is larger than %d bytes", path, b.bytes)
	}
	if egress.ValuesOf(data) > b.values {
		return fmt.Errorf("%s has more than %d values", path, b.values)
	}
	return nil
}

// aggregator is who learns, kube-aggregator's own name.
var aggregator = &user.DefaultInfo{Name: "system:kube-aggregator", Groups: []string{"system:masters"}}

// DiscoveryManager asks the servers what they serve.
type DiscoveryManager struct {
	proxy   *Proxy
	changed func()
	wake    chan struct{}

	mu     sync.Mutex
	cached map[schema.GroupVersion]*CachedDiscovery
}

// NewDiscoveryManager asks p's servers; changed is called when what one serves has changed.
func NewDiscoveryManager(p *Proxy, changed func()) *DiscoveryManager {
	return &DiscoveryManager{proxy: p, changed: changed, wake: make(chan struct{}, 1)}
}

// CachedDiscovery is what one server says of a group version.
type CachedDiscovery struct {
	// Resources is nil where the server has never answered.
	Resources []apidiscoveryv2.APIResourceDiscovery
	// Stale: it did not answer the last time.
	Stale bool
	// OpenAPI and OpenAPIV2 are its documents in JSON, if it has any: of the group version in v3, of all that it serves
	// in v2.
	OpenAPI, OpenAPIV2 []byte
	// OpenAPIDigest and OpenAPIV2Digest name the documents. Every request for a document compares them, and a document
	// has up to 16 MB.
	OpenAPIDigest, OpenAPIV2Digest string
	hash                           string
}

// RefreshSoon asks again soon: the servers have changed.
func (m *DiscoveryManager) RefreshSoon() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run asks until ctx is done.
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

// refresh asks the servers, some in parallel, and publishes each answer as it arrives.
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

// refreshServer asks one server, and says whether what is known of it has changed. What it does not answer this time is as it
// was.
func (m *DiscoveryManager) refreshServer(ctx context.Context, gv schema.GroupVersion, s *server) bool {
	before := m.Lookup(gv)
	now, err := s.fetchDiscovery(ctx, gv)
	if err != nil {
		slog.Debug("An aggregated server does not say what it serves", "group", gv, "error", err)
		now = &CachedDiscovery{Stale: true}
		if before != nil {
			*now = *before
			now.Stale = true
		}
	} else {
		now.OpenAPI, now.OpenAPIV2 = s.fetchDocument(
			ctx,
			"/openapi/v3/apis/"+gv.String(),
		), s.fetchDocument(
			ctx,
			"/openapi/v2",
		)
		if before != nil {
			now.OpenAPI, now.OpenAPIV2 = firstNonNil(
				now.OpenAPI,
				before.OpenAPI,
			), firstNonNil(
				now.OpenAPIV2,
				before.OpenAPIV2,
			)
		}
	}
	data, err := json.Marshal(now.Resources)
	if err != nil {
		return false
	}
	now.OpenAPIDigest, now.OpenAPIV2Digest = digest(now.OpenAPI), digest(now.OpenAPIV2)
	now.hash = digest(data) + " " + now.OpenAPIDigest + " " + now.OpenAPIV2Digest
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cached == nil {
		m.cached = map[schema.GroupVersion]*CachedDiscovery{}
	}
	m.cached[gv] = now
	return before == nil || before.hash != now.hash || before.Stale != now.Stale
}

func digest(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

// fetchDocument is one of the server's in JSON, or nil.
func (s *server) fetchDocument(ctx context.Context, path string) []byte {
	data, _, err := s.get(ctx, path, "application/json", openAPILimit)
	if err != nil || !json.Valid(data) || !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		return nil
	}
	return data
}

func firstNonNil(a, b []byte) []byte {
	if a != nil {
		return a
	}
	return b
}

// Lookup is what is known of a group version; nil where nothing is.
func (m *DiscoveryManager) Lookup(gv schema.GroupVersion) *CachedDiscovery {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cached[gv]
}

// fetchDiscovery asks one server, in the aggregated form or else in the old one.
func (s *server) fetchDiscovery(ctx context.Context, gv schema.GroupVersion) (*CachedDiscovery, error) {
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
					return newCachedDiscovery(v.Resources)
				}
			}
		}
		return nil, fmt.Errorf("it does not list %s", gv)
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
		return nil, fmt.Errorf("it answers of %q when asked of %s", list.GroupVersion, gv)
	}
	resources, err := genericapi.ConvertGroupVersionIntoToDiscovery(list.APIResources)
	if err != nil {
		return nil, err
	}
	return newCachedDiscovery(resources)
}

func newCachedDiscovery(resources []apidiscoveryv2.APIResourceDiscovery) (*CachedDiscovery, error) {
	if resources == nil {
		resources = []apidiscoveryv2.APIResourceDiscovery{}
	}
	return &CachedDiscovery{Resources: resources}, nil
}

// get reads a page of the server's as the aggregator itself.
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
		return nil, "", fmt.Errorf("%s answered %s", path, resp.Status)
	}
	data, err = io.ReadAll(io.LimitReader(resp.Body, int64(limit.bytes)+1))
	if err == nil {
		err = limit.check(path, data)
	}
	return data, resp.Header.Get("Content-Type"), err
}

// GroupVersions are the group versions that others answer for.
func (m *DiscoveryManager) GroupVersions() []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(*m.proxy.servers.Load()), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	})
}
