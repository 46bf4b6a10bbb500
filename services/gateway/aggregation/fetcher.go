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
	"net/http"
	"net/url"
	"strings"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapi "k8s.io/apiserver/pkg/endpoints"

	"watershed.dev/platform/egress"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// refreshInterval is the period of discovery, as in kube-aggregator.
	refreshInterval = time.Minute
	// fetchTimeout bounds the time that a fetch waits for its server. Waits for turns do not count.
	fetchTimeout = 5 * time.Second
	// minRetryDelay is the pause after the first failed fetch, as in kube-aggregator. It doubles with each failure, up
	// to refreshInterval.
	minRetryDelay = 500 * time.Millisecond
	// smallResponse is the number of bytes that a fetcher reads without a turn: 64 MB for 1,000 group versions.
	smallResponse = 64 << 10
	// maxConcurrentReads bounds the responses of smallResponse and more that fetchers read concurrently.
	// maxConcurrentDecodes bounds the responses of any size that they decode. Each may use the limits below.
	maxConcurrentReads   = 4
	maxConcurrentDecodes = 4
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

// These users fetch from the servers, under the names and groups that kube-apiserver has for each kind of fetch.
var (
	aggregatedDiscoveryUser = &user.DefaultInfo{Name: "system:kube-aggregator", Groups: []string{"system:masters"}}
	discoveryUser           = &user.DefaultInfo{Name: "system:kube-aggregator"}
	openAPIUser             = &user.DefaultInfo{Name: "system:aggregator"}
)

// fetcher fetches discovery and documents of a group version from its server.
type fetcher struct {
	manager *DiscoveryManager
	gv      schema.GroupVersion
	wake    chan struct{}
	// cancel and apiService belong to DiscoveryManager.Run. apiService is the newest that the fetcher was woken for.
	cancel     context.CancelFunc
	apiService *registryv1.APIService
	// etags are the ETags of the cached responses by path. They are from the server of etagsOf.
	etags   map[string]string
	etagsOf *registryv1.APIService
}

func newFetcher(m *DiscoveryManager, gv schema.GroupVersion) *fetcher {
	return &fetcher{manager: m, gv: gv, wake: make(chan struct{}, 1)}
}

// run fetches until ctx ends: at each interval, when the server changes, and earlier after a failure.
func (f *fetcher) run(ctx context.Context) {
	retry := minRetryDelay
	for {
		delay := refreshInterval
		if f.fetch(ctx) {
			retry = minRetryDelay
		} else {
			delay, retry = retry, min(2*retry, refreshInterval)
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-f.wake:
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// fetch fetches and publishes discovery, and then the documents. It reports whether discovery needs no retry. The cache
// entry keeps the old content of anything that cannot be fetched. As in kube-aggregator, the documents do not depend on
// discovery.
func (f *fetcher) fetch(ctx context.Context) (ok bool) {
	s := f.manager.proxy.serverFor(f.gv)
	if s == nil { // the fetcher is about to end
		return true
	}
	if f.etagsOf == nil || !sameTransport(f.etagsOf, s.APIService) {
		f.etags, f.etagsOf = map[string]string{}, s.APIService
	}
	var now CachedDiscovery
	if before := f.manager.Lookup(f.gv); before != nil {
		now = *before
	}
	resources, err := f.fetchDiscovery(ctx, s, now.Resources)
	if now.Stale = err != nil; now.Stale {
		slog.Debug("Aggregated server's discovery failed", "groupVersion", f.gv, "error", err)
	} else {
		now.Resources = resources
	}
	f.manager.publish(ctx, f.gv, now)
	if errors.Is(err, errNotAvailable) {
		return true
	}
	if !errors.Is(err, context.DeadlineExceeded) { // otherwise each document would take the timeout too
		if paths := f.fetchOpenAPIPaths(ctx, s); paths != nil {
			now.OpenAPIPaths = paths
		}
		if document := f.fetchDocument(ctx, s, "/openapi/v2", openAPILimit); document != nil {
			now.OpenAPIV2, now.OpenAPIV2Digest = document, digest(document)
		}
		f.manager.publish(ctx, f.gv, now)
	}
	return err == nil
}

func digest(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

// fetchDocument returns a document of the server in JSON. It returns nil if the document cannot be fetched, or has not
// changed.
func (f *fetcher) fetchDocument(ctx context.Context, s *server, path string, limit responseLimit) (document []byte) {
	err := f.get(ctx, s, openAPIUser, path, "application/json", limit, func(data []byte, _ string) error {
		if !json.Valid(data) || !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
			return fmt.Errorf("%s is no JSON object", path)
		}
		document = data
		return nil
	})
	if err != nil && !errors.Is(err, errNotModified) {
		slog.Debug("Aggregated server's OpenAPI failed", "groupVersion", f.gv, "error", err)
	}
	return document
}

// maxDocumentURL bounds the URL of a v3 document in a server's index, in bytes.
const maxDocumentURL = 1 << 10

// fetchOpenAPIPaths returns the root paths and URLs of the server's v3 documents of the group. It returns nil if they
// cannot be fetched, or have not changed. It omits other roots, and URLs that are not the documents': clients and
// admission follow the URLs, and a server must not publish the documents of other groups.
func (f *fetcher) fetchOpenAPIPaths(ctx context.Context, s *server) map[string]string {
	var index struct {
		Paths map[string]struct {
			ServerRelativeURL string `json:"serverRelativeURL"`
		} `json:"paths"`
	}
	data := f.fetchDocument(ctx, s, "/openapi/v3", discoveryLimit)
	if data == nil || json.Unmarshal(data, &index) != nil {
		return nil
	}
	paths := map[string]string{}
	for root, document := range index.Paths {
		location := document.ServerRelativeURL
		version, ofGroup := strings.CutPrefix(root, "apis/"+f.gv.Group+"/")
		if root != "apis/"+f.gv.Group && (!ofGroup || version == "" || strings.Contains(version, "/")) ||
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

// errOldForm reports that a server does not have discovery in the aggregated form.
var errOldForm = errors.New("no aggregated discovery")

// fetchDiscovery fetches the server's resources, in the aggregated form or else in the old form. before are the
// cached resources. Without an error the resources are not nil, because nil means that the server has never responded.
func (f *fetcher) fetchDiscovery(ctx context.Context, s *server,
	before []apidiscoveryv2.APIResourceDiscovery) (resources []apidiscoveryv2.APIResourceDiscovery, err error) {
	const path, accept = "/apis", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
		"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
	err = f.get(ctx, s, aggregatedDiscoveryUser, path, accept, discoveryLimit,
		func(data []byte, contentType string) (err error) {
			if !strings.Contains(contentType, "APIGroupDiscoveryList") {
				return errOldForm
			}
			resources, err = aggregatedResources(data, f.gv)
			return err
		})
	oldPath := "/apis/" + f.gv.String()
	if err == nil {
		delete(f.etags, oldPath)
	}
	var status *statusError
	switch {
	case errors.Is(err, errNotModified):
		return before, nil
	case !errors.Is(err, errOldForm) && (!errors.As(err, &status) || status.code == http.StatusServiceUnavailable):
		return resources, err
	}
	delete(f.etags, path)
	err = f.get(ctx, s, discoveryUser, oldPath, "application/json", discoveryLimit,
		func(data []byte, _ string) (err error) {
			resources, err = oldResources(data, f.gv)
			return err
		})
	if errors.Is(err, errNotModified) {
		return before, nil
	}
	return resources, err
}

// aggregatedResources returns the resources of a group version in aggregated discovery. As in kube-aggregator, a server
// without the group version has no resources.
func aggregatedResources(data []byte, gv schema.GroupVersion) ([]apidiscoveryv2.APIResourceDiscovery, error) {
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
	return []apidiscoveryv2.APIResourceDiscovery{}, nil
}

// oldResources returns the resources of a group version in an APIResourceList.
func oldResources(data []byte, gv schema.GroupVersion) ([]apidiscoveryv2.APIResourceDiscovery, error) {
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

var (
	// errNotAvailable reports that an APIService is not available.
	errNotAvailable = errors.New("the APIService is not available")
	// errNotModified reports that the cached response is the newest.
	errNotModified = errors.New("not modified")
)

// statusError is a response with a status other than 200.
type statusError struct {
	path string
	code int
}

func (e *statusError) Error() string { return fmt.Sprintf("GET %s: %d", e.path, e.code) }

// get fetches a path of the server as a user and passes the response to use. Its ETag counts if use returns no error.
// kube-apiserver fetches discovery also from a server that is not available. Here, each such server that hangs would
// delay the start of a gateway by fetchTimeout.
func (f *fetcher) get(ctx context.Context, s *server, as user.Info, path, accept string, limit responseLimit,
	use func(data []byte, contentType string) error) (err error) {
	if !s.Available || len(s.Addresses) == 0 || s.err != nil {
		return errNotAvailable
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timeout := time.AfterFunc(fetchTimeout, func() { cancel(context.DeadlineExceeded) })
	defer timeout.Stop()
	defer func() {
		if err != nil && ctx.Err() != nil { // transports return context.Canceled
			err = context.Cause(ctx)
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.urlFor(path).String(), nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", accept)
	if etag := f.etags[path]; etag != "" {
		req.Header.Set("If-None-Match", etag)
	}
	resp, err := withUser(as, s.transport).RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotModified:
		return errNotModified
	default:
		return &statusError{path, resp.StatusCode}
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, smallResponse))
	if err != nil {
		return err
	}
	timeout.Stop()
	if len(data) == smallResponse {
		if err := f.manager.reads.take(ctx); err != nil {
			return err
		}
		defer f.manager.reads.end()
		timeout.Reset(fetchTimeout)
		all := io.MultiReader(bytes.NewReader(data), resp.Body)
		if data, err = io.ReadAll(io.LimitReader(all, int64(limit.bytes)+1)); err != nil {
			return err
		}
		timeout.Stop()
	}
	if err := f.manager.decodes.take(ctx); err != nil {
		return err
	}
	defer f.manager.decodes.end()
	if err := limit.check(path, data); err != nil {
		return err
	}
	if err := use(data, resp.Header.Get("Content-Type")); err != nil {
		return err
	}
	f.etags[path] = resp.Header.Get("ETag")
	return nil
}

// turns bounds the fetchers that do the same work concurrently, by its capacity.
type turns chan struct{}

// take waits for a turn. It returns the error of ctx if ctx ends first.
func (t turns) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turns) end() { <-t }
