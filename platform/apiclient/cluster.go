package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchable"
)

const (
	// probePeriod is how often a service compares its informers with etcd's revision.
	probePeriod = time.Second
	// probeTimeout bounds the wait for the informers to reach the revision. Bookmarks come every second.
	probeTimeout = 3 * time.Second
	// initialProbeTimeout bounds the same wait at the start, when the informers have just listed and no bookmark is
	// due.
	initialProbeTimeout = 200 * time.Millisecond
	// minAwaitPause and maxAwaitPause bound the pauses between the first requests for etcd's revision. An informer
	// whose first list fails pauses for 0.8 to 1.6 s.
	minAwaitPause, maxAwaitPause = 20 * time.Millisecond, 500 * time.Millisecond
	// warningPeriod is the least time between two log lines about a gateway that does not return etcd's revision.
	warningPeriod = 10 * time.Second
	// stalledAfter is the age above which a service lists the policy again.
	stalledAfter = 4 * time.Second
	// revisionHedgeDelay and listHedgeDelay are the hedging delays of requests for etcd's revision and for a list.
	revisionHedgeDelay, listHedgeDelay = 500 * time.Millisecond, time.Second
)

// Cluster is a client of the gateway with informers of known age. A service reads its policy with it. The informers'
// events come from the registry's end of the event log. If the log stalls while etcd changes, Cluster updates the
// informers with lists, which the gateway then reads from etcd. If the lists fail too, Err returns an error.
//
// The age is measured end to end, and does not depend on the components in between. Cluster requests etcd's revision.
// Once every tracked informer has reached it, the informers are as fresh as the request.
//
//	unread  --informers reach etcd's revision--> fresh
//	fresh   --age above stalledAfter-----------> stalled: Cluster lists
//
//	stalled --informers reach etcd's revision--> fresh
//	stalled --age above Freshness.Bound--------> stale: Err returns an error
//	stale   --informers reach etcd's revision--> fresh
type Cluster struct {
	Client kubernetes.Interface
	*informerSet

	bound     time.Duration
	trackedMu sync.Mutex
	tracked   []trackedInformer
	// freshAt is when the informers were last known to be complete; nil: never.
	freshAt atomic.Pointer[time.Time]
	// synced is closed once the shared informers have listed, and firstFresh once freshAt is set.
	synced, firstFresh chan struct{}
	// rounds is the number of the last round of lists. probe owns lastRound, the time of the last round.
	rounds watchable.Value[int64]
	// listing is the slot of the list of a ListWatch.
	listing   chan struct{}
	lastRound time.Time
}

// trackedInformer is an informer whose age counts.
type trackedInformer struct {
	// path lists its objects, with the query that selects them.
	path, query string
	informer    cache.SharedIndexInformer
}

// NewCluster returns a Cluster that reads with c. strip removes fields that the service does not read; other services
// of the process may read them.
func NewCluster(c *Conn, f Freshness, strip ...func(obj any)) (*Cluster, error) {
	set, err := newInformerSet(c, strip)
	if err != nil {
		return nil, err
	}
	client, err := set.newClient(c.Config)
	if err != nil {
		return nil, err
	}
	return &Cluster{Client: client, informerSet: set, bound: f.Bound, synced: make(chan struct{}),
		firstFresh: make(chan struct{}), listing: make(chan struct{}, 1)}, nil
}

// TrackAge makes the age of an informer count. path lists its objects ("/apis/rbac.authorization.k8s.io/v1/roles"),
// and query selects them.
func (c *Cluster) TrackAge(path, query string, i cache.SharedIndexInformer) {
	c.trackedMu.Lock()
	defer c.trackedMu.Unlock()
	c.tracked = append(c.tracked, trackedInformer{path, query, i})
}

// Age returns the maximum age of the informers' content. ok is false if it has never been complete.
func (c *Cluster) Age() (age time.Duration, ok bool) {
	freshAt := c.freshAt.Load()
	if freshAt == nil {
		return 0, false
	}
	return lifecycle.Age(*freshAt), true
}

// Synced returns a channel that is closed once the shared informers of served resources have read their objects. It
// does not cover the informers that Run's starts have started.
func (c *Cluster) Synced() <-chan struct{} { return c.synced }

// Fresh returns a channel that is closed once the tracked informers have been complete for the first time.
func (c *Cluster) Fresh() <-chan struct{} { return c.firstFresh }

// Err returns an error if the age is above the bound, or if the policy has never been complete.
func (c *Cluster) Err() error {
	if c.bound <= 0 {
		return nil
	}
	switch age, known := c.Age(); {
	case !known:
		return errors.New("the policy has not been read yet")
	case age > c.bound:
		return fmt.Errorf("the policy may be stale: it is from %v ago, and the limit is %v "+
			"(--policy-freshness-bound)", age.Round(time.Second), c.bound)
	}
	return nil
}

// Run runs the informers and measures their age until ctx is done. It starts them once the gateway has returned etcd's
// revision. Before that it calls each of starts, which starts further informers of the service.
func (c *Cluster) Run(ctx context.Context, starts ...func(stop <-chan struct{})) error {
	if err := c.awaitRevision(ctx); err != nil {
		return err
	}
	for _, start := range starts {
		start(ctx.Done())
	}
	defer c.start()()
	c.waitForSync(ctx)
	if ctx.Err() == nil {
		close(c.synced)
	}
	for logged := (time.Time{}); ctx.Err() == nil; {
		err := c.probe(ctx)
		_, known := c.Age()
		pause := probePeriod
		if !known {
			pause = initialProbeTimeout
		} else if err != nil && ctx.Err() == nil && time.Since(logged) >= warningPeriod {
			slog.Warn("The age of the policy is unknown", "error", err)
			logged = time.Now()
		}
		_ = lifecycle.Sleep(ctx, pause)
	}
	return ctx.Err()
}

// awaitRevision waits until the gateway has returned etcd's revision. It logs the error every warningPeriod.
func (c *Cluster) awaitRevision(ctx context.Context) error {
	logged := time.Now()
	for pause := minAwaitPause; ; pause = min(2*pause, maxAwaitPause) {
		attempt, cancel := context.WithTimeout(ctx, c.timeout())
		_, err := c.revision(attempt)
		if cancel(); err == nil {
			return nil
		}
		if time.Since(logged) >= warningPeriod && ctx.Err() == nil {
			slog.Warn("The gateway does not return etcd's revision; the informers wait for it", "error", err)
			logged = time.Now()
		}
		if err := lifecycle.Sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// probe requests etcd's revision and waits until all tracked informers have reached it. It updates informers with
// lists if they are behind for too long.
func (c *Cluster) probe(ctx context.Context) error {
	start := time.Now()
	probeCtx, cancel := context.WithTimeout(ctx, c.timeout())
	defer cancel()
	revision, err := c.revision(probeCtx)
	if err != nil {
		return err
	}
	_, known := c.Age()
	timeout := probeTimeout
	if !known { // the informers have just listed
		timeout = initialProbeTimeout
	}
	stalled := func() bool {
		age, known := c.Age()
		return known && age > stalledAfter
	}
	behind := c.waitForRevision(probeCtx, revision, timeout, stalled)
	if len(behind) > 0 && (!known || stalled()) {
		if known {
			slog.Warn("The event log lags behind etcd; the policy is read with lists",
				"revision", revision, "behind", describe(behind))
			c.beginRound()
		}
		errs := make([]error, len(behind))
		var all sync.WaitGroup
		for i, f := range behind {
			all.Go(func() {
				if err := c.catchUp(ctx, f, revision); err != nil {
					errs[i] = fmt.Errorf("%s: %w", f.path, err)
				}
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		// The lists are of this revision or a later revision. An overloaded process needs some time to process them.
		behind = c.waitForRevision(probeCtx, revision, timeout, func() bool { return false })
		if len(behind) > 0 {
			return fmt.Errorf("informers have not reached etcd's revision %d: %v", revision, describe(behind))
		}
	}
	if len(behind) == 0 && c.freshAt.Swap(&start) == nil {
		close(c.firstFresh)
	}
	return nil
}

// beginRound makes every watch of a ListWatch list, at most every stalledAfter.
func (c *Cluster) beginRound() {
	if now := time.Now(); now.Sub(c.lastRound) >= stalledAfter {
		c.lastRound = now
		c.rounds.Update(func(n int64) (int64, bool) { return n + 1, true })
	}
}

// waitForRevision waits until all tracked informers have reached a revision, for at most timeout or until stop returns
// true. It returns the informers that have not.
func (c *Cluster) waitForRevision(ctx context.Context, revision int64, timeout time.Duration,
	stop func() bool) []trackedInformer {
	behind := c.behind(revision)
	for until := time.Now().Add(timeout); len(behind) > 0 && time.Now().Before(until) && ctx.Err() == nil &&
		!stop(); behind = c.behind(revision) {
		_ = lifecycle.Sleep(ctx, 20*time.Millisecond)
	}
	return behind
}

func (c *Cluster) timeout() time.Duration {
	if c.bound > 0 {
		return max(c.bound, probeTimeout)
	}
	return 10 * time.Second
}

// revision returns etcd's revision, from a consistent list. The list has a single object, so other objects cannot make
// it fail. Callers repeat it: client-go's own repetitions wait for a second, and hide the error.
func (c *Cluster) revision(ctx context.Context) (int64, error) {
	data, err := rpc.Hedged(ctx, revisionHedgeDelay, func(ctx context.Context) ([]byte, error) {
		return c.Client.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces").Param("fieldSelector",
			"metadata.name="+metav1.NamespaceSystem).
			SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").
			MaxRetries(0).Do(ctx).Raw()
	})
	if err != nil {
		return 0, err
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(data, &list); err != nil {
		return 0, err
	}
	return strconv.ParseInt(list.ResourceVersion, 10, 64)
}

// isBehind reports if the informer has not reached a revision.
func (f trackedInformer) isBehind(revision int64) bool {
	synced, err := strconv.ParseInt(f.informer.LastSyncResourceVersion(), 10, 64)
	return err != nil || synced < revision
}

// behind returns the tracked informers that have not reached a revision. It omits an informer that has never listed
// because its resource is not served. As in kube-apiserver, the informer is then empty.
func (c *Cluster) behind(revision int64) (out []trackedInformer) {
	c.trackedMu.Lock()
	defer c.trackedMu.Unlock()
	for _, f := range c.tracked {
		unserved := f.informer.LastSyncResourceVersion() == "" && c.streams.isUnserved(f.path)
		if f.isBehind(revision) && !unserved {
			out = append(out, f)
		}
	}
	return out
}

// describe returns the paths and revisions of informers.
func describe(behind []trackedInformer) []string {
	var out []string
	for _, f := range behind {
		out = append(out, f.path+"@"+f.informer.LastSyncResourceVersion())
	}
	return out
}
