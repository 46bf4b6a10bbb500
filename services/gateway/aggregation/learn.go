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
	// learnAgain is how often a server is asked what it serves, kube-aggregator's.
	learnAgain   = time.Minute
	learnTimeout = 5 * time.Second
	// learnAtOnce is how many servers are read at a time: each may fill the bounds below.
	learnAtOnce = 4
)

// bound is how large a server's answer may be: in bytes, and in JSON values, because three bytes of JSON become a
// struct of hundreds. kube-aggregator has no such bound.
type bound struct{ bytes, values int }

var (
	// ofDiscovery is 25 times what kube-apiserver itself lists in aggregated discovery.
	ofDiscovery = bound{4 << 20, 50_000}
	// ofDocuments is three times kube-apiserver's own OpenAPI v2, which has all groups.
	ofDocuments = bound{16 << 20, 200_000}
)

// check fails for an answer that exceeds the bound.
func (b bound) check(path string, data []byte) error {
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

// Learner asks the servers what they serve.
type Learner struct {
	proxy   *Proxy
	changed func()
	wake    chan struct{}

	mu    sync.Mutex
	known map[schema.GroupVersion]*Learned
}

// NewLearner asks p's servers; changed is called when what one serves has changed.
func NewLearner(p *Proxy, changed func()) *Learner {
	return &Learner{proxy: p, changed: changed, wake: make(chan struct{}, 1)}
}

// Learned is what one server says of a group version.
type Learned struct {
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

// Wake asks again soon: the servers have changed.
func (l *Learner) Wake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Run asks until ctx is done.
func (l *Learner) Run(ctx context.Context) {
	l.Wake()
	tick := time.NewTicker(learnAgain)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.wake:
		}
		l.learn(ctx)
	}
}

// learn asks the servers, some in parallel, and publishes each answer as it arrives.
func (l *Learner) learn(ctx context.Context) {
	servers := *l.proxy.current.Load()
	l.mu.Lock()
	gone := false
	for gv := range l.known {
		if servers[gv] == nil {
			delete(l.known, gv)
			gone = true
		}
	}
	l.mu.Unlock()
	if gone {
		l.changed()
	}
	var wg sync.WaitGroup
	turns := make(chan struct{}, learnAtOnce)
	for gv, r := range servers {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			if l.one(ctx, gv, r) {
				l.changed()
			}
		})
	}
	wg.Wait()
}

// one asks one server, and says whether what is known of it has changed. What it does not answer this time is as it
// was.
func (l *Learner) one(ctx context.Context, gv schema.GroupVersion, r *server) bool {
	before := l.Of(gv)
	now, err := r.learn(ctx, gv)
	if err != nil {
		slog.Debug("An aggregated server does not say what it serves", "group", gv, "error", err)
		now = &Learned{Stale: true}
		if before != nil {
			*now = *before
			now.Stale = true
		}
	} else {
		now.OpenAPI, now.OpenAPIV2 = r.document(ctx, "/openapi/v3/apis/"+gv.String()), r.document(ctx, "/openapi/v2")
		if before != nil {
			now.OpenAPI, now.OpenAPIV2 = either(now.OpenAPI, before.OpenAPI), either(now.OpenAPIV2, before.OpenAPIV2)
		}
	}
	data, err := json.Marshal(now.Resources)
	if err != nil {
		return false
	}
	now.OpenAPIDigest, now.OpenAPIV2Digest = digest(now.OpenAPI), digest(now.OpenAPIV2)
	now.hash = digest(data) + " " + now.OpenAPIDigest + " " + now.OpenAPIV2Digest
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known == nil {
		l.known = map[schema.GroupVersion]*Learned{}
	}
	l.known[gv] = now
	return before == nil || before.hash != now.hash || before.Stale != now.Stale
}

func digest(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

// document is one of the server's in JSON, or nil.
func (r *server) document(ctx context.Context, path string) []byte {
	data, _, err := r.get(ctx, path, "application/json", ofDocuments)
	if err != nil || !json.Valid(data) || !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		return nil
	}
	return data
}

func either(a, b []byte) []byte {
	if a != nil {
		return a
	}
	return b
}

// Of is what is known of a group version; nil where nothing is.
func (l *Learner) Of(gv schema.GroupVersion) *Learned {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.known[gv]
}

// learn asks one server, in the aggregated form or else in the old one.
func (r *server) learn(ctx context.Context, gv schema.GroupVersion) (*Learned, error) {
	const accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
		"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
	data, contentType, err := r.get(ctx, "/apis", accept, ofDiscovery)
	if err == nil && strings.Contains(contentType, "APIGroupDiscoveryList") {
		var list apidiscoveryv2.APIGroupDiscoveryList
		if err := json.Unmarshal(data, &list); err != nil {
			return nil, err
		}
		for _, g := range list.Items {
			for _, v := range g.Versions {
				if g.Name == gv.Group && v.Version == gv.Version {
					return learned(v.Resources)
				}
			}
		}
		return nil, fmt.Errorf("it does not list %s", gv)
	}
	data, _, err = r.get(ctx, "/apis/"+gv.String(), "application/json", ofDiscovery)
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
	return learned(resources)
}

func learned(resources []apidiscoveryv2.APIResourceDiscovery) (*Learned, error) {
	if resources == nil {
		resources = []apidiscoveryv2.APIResourceDiscovery{}
	}
	return &Learned{Resources: resources}, nil
}

// get reads a page of the server's as the aggregator itself.
func (r *server) get(ctx context.Context, path, accept string,
	most bound) (data []byte, contentType string, err error) {
	if !r.Available || len(r.Addresses) == 0 || r.err != nil {
		return nil, "", fmt.Errorf("%s.%s is not available", r.Version, r.Group)
	}
	ctx, cancel := context.WithTimeout(ctx, learnTimeout)
	defer cancel()
	u := r.at(path)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("Accept", accept)
	resp, err := as(aggregator, r.transport).RoundTrip(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, "", fmt.Errorf("%s answered %s", path, resp.Status)
	}
	data, err = io.ReadAll(io.LimitReader(resp.Body, int64(most.bytes)+1))
	if err == nil {
		err = most.check(path, data)
	}
	return data, resp.Header.Get("Content-Type"), err
}

// Groups are the group versions that others answer for.
func (l *Learner) Groups() []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(*l.proxy.current.Load()), func(a, b schema.GroupVersion) int {
		return strings.Compare(a.String(), b.String())
	})
}
