// Package flowcontrol implements API Priority and Fairness (KEP-1040) with upstream's flow control
// (k8s.io/apiserver/pkg/util/flowcontrol): its objects, defaults, headers, metrics and debug pages. It does not limit
// watches after their initial events, or the size of bodies.
//
// It differs from kube-apiserver in two ways. The concurrency limit is the cluster's, and each live gateway has an
// equal share of it. The seats of a LIST come from the size of its last response.
//
// Goroutines: Run owns the controllers. A change of the number of gateways starts a new controller, because
// upstream's cannot change its limit.
//
//	new --- run ---> syncing --- awaitSynced ---> active --- Swap ---> draining --- drainTimeout ---> retired.
package flowcontrol

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	fcrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	flowcontrollisters "k8s.io/client-go/listers/flowcontrol/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchable"
)

// Config holds the setting of flow control.
type Config struct {
	Enabled bool
}

// AddFlags registers --enable-priority-and-fairness.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.Enabled, "enable-priority-and-fairness", true,
		"If true, replace the max-in-flight handler with an enhanced one that queues and dispatches with priority and "+
			"fairness.")
}

// Fairness limits requests by flow. It is safe for concurrent use.
type Fairness struct {
	client kubernetes.Interface
	// seats is the cluster's limit.
	seats int
	// gateways is the number of live gateways. 0: it is not known yet.
	gateways *watchable.Value[int]
	sizes    *listSizes
	active   atomic.Pointer[controller]
	// ready is closed once a controller has synced.
	ready chan struct{}
	once  sync.Once
}

// controller is upstream's controller for a fixed number of seats.
type controller struct {
	flowcontrol.Interface
	seats int
	pages *mux.PathRecorderMux
	// run watches the objects until its context is done or retired is closed. synced is closed once the controller has
	// applied the objects.
	run             func(context.Context)
	synced, retired chan struct{}
}

// syncPollInterval is the delay between two checks of a controller's priority levels.
const syncPollInterval = 20 * time.Millisecond

// awaitSynced waits until the controller has applied the existing priority levels and FlowSchemas. It then has the
// maximum seats of each queuing level. Upstream has no better signal. It returns false if ctx is done first.
func (c *controller) awaitSynced(ctx context.Context, levels flowcontrollisters.PriorityLevelConfigurationLister) bool {
	for {
		list, err := levels.List(labels.Everything())
		unknown := func(l *flowcontrolv1.PriorityLevelConfiguration) bool {
			queues := l.Spec.Limited != nil && l.Spec.Limited.LimitResponse.Queuing != nil
			return queues && c.GetMaxSeats(l.Name) == 0
		}
		if err == nil && len(list) > 0 && !slices.ContainsFunc(list, unknown) && c.applied(ctx) {
			close(c.synced)
			return true
		}
		if lifecycle.Sleep(ctx, syncPollInterval) != nil {
			return false
		}
	}
}

// applied reports whether the controller has replaced upstream's mandatory objects, which have no UID, by the API's.
func (c *controller) applied(ctx context.Context) (yes bool) {
	c.Handle(ctx, flowcontrol.RequestDigest{
		RequestInfo: &request.RequestInfo{Verb: "get", Path: "/"},
		User:        &user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.SystemPrivilegedGroup}},
	}, func(schema *flowcontrolv1.FlowSchema, level *flowcontrolv1.PriorityLevelConfiguration, _ string) {
		yes = schema.UID != "" && level.UID != ""
	}, func() fcrequest.WorkEstimate { return fcrequest.WorkEstimate{InitialSeats: 1} }, func(bool) {}, func() {})
	return yes
}

// New returns the flow control of a gateway. config is for calls to the API, gateways is the number of live gateways
// (0: unknown), and seats is the cluster's concurrency limit.
func New(config *rest.Config, gateways *watchable.Value[int], seats int) (*Fairness, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	f := &Fairness{
		client:   client,
		seats:    seats,
		gateways: gateways,
		sizes:    newListSizes(),
		ready:    make(chan struct{}),
	}
	f.active.Store(f.controller(seats))
	return f, nil
}

// controller returns a controller that is not running yet. Until it has read the objects, it has upstream's mandatory
// objects.
func (f *Fairness) controller(seats int) *controller {
	factory := informers.NewSharedInformerFactoryWithOptions(f.client, 0, informers.WithTransform(sanitize))
	c := &controller{
		Interface: flowcontrol.New(factory, f.client.FlowcontrolV1(), seats),
		seats:     seats,
		pages:     mux.NewPathRecorderMux("flow control"),
		synced:    make(chan struct{}),
		retired:   make(chan struct{}),
	}
	levels := factory.Flowcontrol().V1().PriorityLevelConfigurations()
	c.Install(c.pages)
	c.run = func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		var wg sync.WaitGroup
		defer wg.Wait()
		defer factory.Shutdown()
		factory.Start(ctx.Done())
		wg.Go(func() { _ = c.Run(ctx.Done()) })
		wg.Go(func() {
			factory.WaitForCacheSync(ctx.Done())
			if c.awaitSynced(ctx, levels.Lister()) {
				f.once.Do(func() { close(f.ready) })
			}
		})
		select {
		case <-ctx.Done():
		case <-c.retired:
		}
		cancel()
	}
	return c
}

// Ready is closed once the configured objects are in effect.
func (f *Fairness) Ready() <-chan struct{} { return f.ready }

// Run adjusts the gateway's share of the seats until ctx is done.
func (f *Fairness) Run(ctx context.Context) {
	genericfilters.StartPriorityAndFairnessWatermarkMaintenance(ctx.Done())
	var wg sync.WaitGroup
	defer wg.Wait()
	begin := func(c *controller) {
		wg.Go(func() { c.run(ctx) })
	}
	begin(f.active.Load())
	seats := f.seats
	for {
		n, changed := f.gateways.Get()
		n = max(1, n)
		share := max(1, (f.seats+n-1)/n)
		if share == seats {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			continue
		}
		slog.Info("The number of gateways changed, flow control adjusts its seats",
			"gateways", n, "seats", share, "totalSeats", f.seats)
		next := f.controller(share)
		seats = share
		begin(next)
		select {
		case <-ctx.Done():
			return
		case <-next.synced:
		}
		// Requests admitted by the old controller finish there, and it still dispatches its queue. Until then, each
		// controller applies its own limit.
		old := f.active.Swap(next)
		time.AfterFunc(drainTimeout, func() { close(old.retired) })
	}
}

// drainTimeout is how long a replaced controller still runs.
const drainTimeout = time.Minute

// InfoOf returns a request's own RequestInfo. shown is the RequestInfo in ctx, from which metrics take their labels. It
// may lack the path and the resource, which FlowSchemas match.
type InfoOf func(ctx context.Context, shown *request.RequestInfo) *request.RequestInfo

// Filter limits the requests to next, as upstream's filter does. A request waits in a queue for at most a quarter of
// timeout.
func (f *Fairness) Filter(next http.Handler, longRunning request.LongRunningRequestCheck, own InfoOf,
	timeout time.Duration) http.Handler {
	return genericfilters.WithPriorityAndFairness(next, longRunning, activeController{f, own}, f.estimate, timeout/4)
}

// activeController passes the active controller to upstream's filter.
type activeController struct {
	*Fairness
	own InfoOf
}

// Handle implements flowcontrol.Interface. A request stays with the controller that admitted it.
func (c activeController) Handle(ctx context.Context, r flowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	estimate func() fcrequest.WorkEstimate, queued fairqueuing.QueueNoteFn, run func()) {
	r.RequestInfo = c.own(ctx, r.RequestInfo)
	c.active.Load().Handle(ctx, r, note, estimate, queued, run)
}

// Run implements flowcontrol.Interface. Fairness.Run does the work.
func (activeController) Run(<-chan struct{}) error { return nil }

// Install implements flowcontrol.Interface. Fairness.ServeHTTP serves the pages.
func (activeController) Install(*mux.PathRecorderMux) {}

// RegisterWatch implements flowcontrol.Interface. Writes are not charged for watches of others.
func (activeController) RegisterWatch(*http.Request) flowcontrol.ForgetWatchFunc { return nil }

// GetInterestedWatchCount implements flowcontrol.Interface.
func (activeController) GetInterestedWatchCount(*request.RequestInfo) int { return 0 }

// GetMaxSeats implements flowcontrol.Interface.
func (c activeController) GetMaxSeats(level string) uint64 { return c.active.Load().GetMaxSeats(level) }

// SetMaxSeats implements flowcontrol.Interface. The controller sets its own.
func (activeController) SetMaxSeats(string, uint64) {}

// ForgetPriorityLevel implements flowcontrol.Interface. The controller forgets its own.
func (activeController) ForgetPriorityLevel(string) {}

// ServeHTTP serves upstream's debug pages, /debug/api_priority_and_fairness/….
func (f *Fairness) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	f.active.Load().pages.ServeHTTP(w, req)
}
