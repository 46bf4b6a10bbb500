package aggregation

import (
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
)

const (
	// learnAgain is how often a server is asked what it serves, kube-aggregator's.
	learnAgain   = time.Minute
	learnTimeout = 5 * time.Second
	// learnMost bounds what a server may answer.
	learnMost = 64 << 20
)

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
	// OpenAPI is its document of v3 in JSON, if it has one.
	OpenAPI []byte
	hash    string
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
		if l.learn(ctx) {
			l.changed()
		}
	}
}

// learn asks every server at once, and says whether anything is new.
func (l *Learner) learn(ctx context.Context) bool {
	servers := *l.proxy.current.Load()
	now := map[schema.GroupVersion]*Learned{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for gv, r := range servers {
		wg.Go(func() {
			learned, err := r.learn(ctx, gv)
			if err == nil {
				learned.OpenAPI, _, _ = r.get(ctx, "/openapi/v3/apis/"+gv.String(), "application/json")
				learned.hash += fmt.Sprintf(" %x", sha256.Sum256(learned.OpenAPI))
			}
			if err != nil {
				slog.Debug("An aggregated server does not say what it serves", "group", gv, "error", err)
				learned = &Learned{Stale: true, hash: "stale"}
				if before := l.Of(gv); before != nil {
					learned.Resources, learned.OpenAPI = before.Resources, before.OpenAPI
				}
			}
			mu.Lock()
			defer mu.Unlock()
			now[gv] = learned
		})
	}
	wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	same := maps.EqualFunc(now, l.known, func(a, b *Learned) bool { return a.hash == b.hash && a.Stale == b.Stale })
	l.known = now
	return !same
}

// Of is what is known of a group version; nil where nothing is.
func (l *Learner) Of(gv schema.GroupVersion) *Learned {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.known[gv]
}

// learn asks one server, in the aggregated form or else in the old one.
func (r *remote) learn(ctx context.Context, gv schema.GroupVersion) (*Learned, error) {
	const accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
	data, contentType, err := r.get(ctx, "/apis", accept)
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
	data, _, err = r.get(ctx, "/apis/"+gv.String(), "application/json")
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
	data, err := json.Marshal(resources)
	return &Learned{Resources: resources, hash: fmt.Sprintf("%x", sha256.Sum256(data))}, err
}

// get reads a page of the server's as the aggregator itself.
func (r *remote) get(ctx context.Context, path, accept string) (data []byte, contentType string, err error) {
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
	data, err = io.ReadAll(io.LimitReader(resp.Body, learnMost+1))
	if err == nil && len(data) > learnMost {
		err = fmt.Errorf("%s is larger than %d bytes", path, learnMost)
	}
	return data, resp.Header.Get("Content-Type"), err
}

// OpenAPIV2 reads the whole document of v2 of a group version's server.
func (l *Learner) OpenAPIV2(ctx context.Context, gv schema.GroupVersion) ([]byte, error) {
	r := l.proxy.remote(gv)
	if r == nil {
		return nil, fmt.Errorf("nobody answers for %s", gv)
	}
	data, _, err := r.get(ctx, "/openapi/v2", "application/json")
	return data, err
}

// Groups are the group versions that others answer for.
func (l *Learner) Groups() []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(*l.proxy.current.Load()), func(a, b schema.GroupVersion) int { return strings.Compare(a.String(), b.String()) })
}
