package aggregation

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// DiscoveryManager caches the discovery of aggregated servers. Each group version has a fetcher, so that no server
// waits for another. The cache entry of a group version has these states:
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
	// reads are the turns in which fetchers read large responses. In the turns of decodes they decode responses. A
	// fetcher takes no turn until the server has sent smallResponse bytes or the whole response. So a slow server
	// delays only large responses of other servers.
	reads, decodes turns

	mu     sync.Mutex
	cached map[schema.GroupVersion]*CachedDiscovery
}

// NewDiscoveryManager returns a manager for p's servers. It calls changed after a server's discovery or documents have
// changed.
func NewDiscoveryManager(p *Proxy, changed func()) *DiscoveryManager {
	return &DiscoveryManager{
		proxy:   p,
		changed: changed,
		wake:    make(chan struct{}, 1),
		reads:   make(turns, maxConcurrentReads),
		decodes: make(turns, maxConcurrentDecodes),
		cached:  map[schema.GroupVersion]*CachedDiscovery{},
	}
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

// RefreshSoon makes Run fetch from the servers that have changed.
func (m *DiscoveryManager) RefreshSoon() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run runs a fetcher for each server until ctx ends.
func (m *DiscoveryManager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	fetchers := map[schema.GroupVersion]*fetcher{}
	m.RefreshSoon()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		}
		servers := *m.proxy.servers.Load()
		for gv, f := range fetchers {
			if servers[gv] == nil {
				f.cancel()
				m.forget(gv)
				delete(fetchers, gv)
			}
		}
		for gv, s := range servers {
			f := fetchers[gv]
			switch {
			case f == nil:
				f = newFetcher(m, gv)
				fetchers[gv] = f
				var fetcherCtx context.Context
				fetcherCtx, f.cancel = context.WithCancel(ctx)
				wg.Go(func() { f.run(fetcherCtx) })
			case !proto.Equal(f.apiService, s.APIService):
				select {
				case f.wake <- struct{}{}:
				default:
				}
			}
			f.apiService = s.APIService
		}
	}
}

// forget removes the cache entry of a group version. Its fetcher is canceled.
func (m *DiscoveryManager) forget(gv schema.GroupVersion) {
	m.mu.Lock()
	_, cached := m.cached[gv]
	delete(m.cached, gv)
	m.mu.Unlock()
	if cached {
		m.changed()
	}
}

// publish makes now the cache entry of a group version, unless ctx has ended.
func (m *DiscoveryManager) publish(ctx context.Context, gv schema.GroupVersion, now CachedDiscovery) {
	data, err := json.Marshal([]any{now.Resources, now.OpenAPIPaths})
	if err != nil {
		return
	}
	now.hash = digest(data) + " " + now.OpenAPIV2Digest
	m.mu.Lock()
	if ctx.Err() != nil { // the entry may be deleted
		m.mu.Unlock()
		return
	}
	before := m.cached[gv]
	m.cached[gv] = &now
	m.mu.Unlock()
	if before == nil || before.hash != now.hash || before.Stale != now.Stale {
		m.changed()
	}
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

// GroupVersions returns the group versions of aggregated servers, sorted.
func (m *DiscoveryManager) GroupVersions() []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(*m.proxy.servers.Load()), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	})
}
