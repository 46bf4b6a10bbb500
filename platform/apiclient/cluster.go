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

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/rpc"
)

// Freshness is how old the policy that a service decides by may be.
type Freshness struct {
	// Bound is the age from which on the service decides nothing; 0: any age will do.
	Bound time.Duration
}

// AddFlags adds the flag.
func (f *Freshness) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&f.Bound, "policy-freshness-bound", 10*time.Second,
		"How old the cluster's policy may be that this service decides by. Beyond it, requests that need it are "+
			"refused with 503 until the service has caught up. 0: it may be of any age.")
}

const (
	// probePeriod is how often a service compares what it knows with etcd's revision.
	probePeriod = time.Second
	// probeTimeout is how long one comparison waits for what it knows to come as far: bookmarks come every second.
	probeTimeout = 3 * time.Second
	// initialProbeTimeout is how long it waits at the start, when everything has just been listed and no bookmark is due yet.
	initialProbeTimeout = 200 * time.Millisecond
	// stalledAfter is from what age on what it knows is read anew.
	stalledAfter = 4 * time.Second
	// revisionHedgeDelay and listHedgeDelay are after how long without an answer etcd's revision, or a list, is asked for again.
	revisionHedgeDelay, listHedgeDelay = 500 * time.Millisecond, time.Second
)

// Cluster is the cluster as a service of the system reads it: an ordinary client of the gateway, with informers that
// know how old they are. Events come to them from registry's end of the event log. Where the log stalls, while writes
// go on, they are brought up to date with lists, which the gateway then answers from etcd; and where that fails too,
// Err says so.
//
// How fresh they are is measured end to end, and believes nobody in between: etcd's revision is asked for, and when
// every informer has been told of all up to it, they are as fresh as the question.
type Cluster struct {
	Client    kubernetes.Interface
	Informers informers.SharedInformerFactory

	bound   time.Duration
	streams *streams
	mu      sync.Mutex
	tracked []trackedInformer
	// freshAt is when what is known was the truth, in nanoseconds since 1970; 0: never yet.
	freshAt    atomic.Int64
	firstFresh chan struct{}
}

// trackedInformer is an informer that has to be fresh.
type trackedInformer struct {
	// path is where its objects are listed, with the query that selects them.
	path, query string
	informer    cache.SharedIndexInformer
}

// listClient is a client whose informers begin with a list: one that the gateway can answer from etcd where the event log
// stalls.
type listClient struct{ kubernetes.Interface }

// IsWatchListSemanticsUnSupported is what client-go asks a client (k8s.io/client-go/util/watchlist).
func (listClient) IsWatchListSemanticsUnSupported() bool { return true }

// NewCluster returns a cluster that is read with c, which is for typed clients. strip takes off objects what the
// service does not read.
func NewCluster(c *rest.Config, f Freshness, strip ...func(obj any)) (*Cluster, error) {
	s := &streams{open: map[*stream]struct{}{}}
	typed := Protobuf(c)
	typed.Wrap(s.wrap)
	client, err := kubernetes.NewForConfig(typed)
	if err != nil {
		return nil, err
	}
	l := listClient{client}
	return &Cluster{
		Client:     l,
		Informers:  Informers(l, strip...),
		bound:      f.Bound,
		streams:    s,
		firstFresh: make(chan struct{}),
	}, nil
}

// TrackAge makes an informer's age count. path is where its objects are listed
// ("/apis/rbac.authorization.k8s.io/v1/roles"), and query what selects them there.
func (c *Cluster) TrackAge(path, query string, i cache.SharedIndexInformer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tracked = append(c.tracked, trackedInformer{path, query, i})
}

// Age is how old what is known may be; ok is false where it has never been known.
func (c *Cluster) Age() (age time.Duration, ok bool) {
	freshAt := c.freshAt.Load()
	return time.Since(time.Unix(0, freshAt)), freshAt != 0
}

// Fresh is closed once what is followed has been known to be fresh for the first time.
func (c *Cluster) Fresh() <-chan struct{} { return c.firstFresh }

// Err says that what is known is older than the bound, or is nil.
func (c *Cluster) Err() error {
	if c.bound <= 0 {
		return nil
	}
	switch age, known := c.Age(); {
	case !known:
		return errors.New("the policy has not been read yet")
	case age > c.bound:
		return fmt.Errorf("the policy is not known to be fresh: it is as of %v ago, and may be %v old "+
			"(--policy-freshness-bound)", age.Round(time.Second), c.bound)
	}
	return nil
}

// Run follows the cluster until ctx is done.
func (c *Cluster) Run(ctx context.Context) error {
	c.Informers.Start(ctx.Done())
	defer c.Informers.Shutdown()
	c.Informers.WaitForCacheSync(ctx.Done())
	for ctx.Err() == nil {
		err := c.probe(ctx)
		_, known := c.Age()
		pause := probePeriod
		if !known {
			pause = initialProbeTimeout
		} else if err != nil && ctx.Err() == nil {
			slog.Warn("How fresh the policy is cannot be told", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return ctx.Err()
}

// probe asks for etcd's revision and waits until all that is followed has come as far. What does not, for too long, is
// read anew.
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
	if !known { // it has just been listed
		timeout = initialProbeTimeout
	}
	behind := c.waitForRevision(probeCtx, revision, timeout)
	if age, _ := c.Age(); len(behind) > 0 && (!known || age > stalledAfter) {
		if known {
			slog.Warn("The event log does not bring what etcd has; the policy is read with lists",
				"revision", revision, "behind", describe(behind))
		}
		errs := make([]error, len(behind))
		var all sync.WaitGroup
		for i, f := range behind {
			all.Go(func() {
				if err := c.catchUp(ctx, f); err != nil {
					errs[i] = fmt.Errorf("%s: %w", f.path, err)
				}
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		behind = c.waitForRevision(probeCtx, revision, initialProbeTimeout)
	}
	if len(behind) == 0 {
		if c.freshAt.Swap(start.UnixNano()) == 0 {
			close(c.firstFresh)
		}
	}
	return nil
}

// waitForRevision waits until all that is followed has come to a revision, and answers what has not. It does not wait for longer
// than what is known may go on being believed.
func (c *Cluster) waitForRevision(ctx context.Context, revision int64, timeout time.Duration) []trackedInformer {
	behind := c.behind(revision)
	for until := time.Now().Add(timeout); len(behind) > 0 && time.Now().Before(until) &&
		ctx.Err() == nil; behind = c.behind(revision) {
		if age, known := c.Age(); known && age > stalledAfter && timeout > initialProbeTimeout {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return behind
}

func (c *Cluster) timeout() time.Duration {
	if c.bound > 0 {
		return max(c.bound, probeTimeout)
	}
	return 10 * time.Second
}

// revision is etcd's, by a list that is consistent whoever answers it. It is of one object, and none other can keep it
// from being answered.
func (c *Cluster) revision(ctx context.Context) (int64, error) {
	data, err := rpc.Hedged(ctx, revisionHedgeDelay, func(ctx context.Context) ([]byte, error) {
		return c.Client.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces").Param("fieldSelector",
			"metadata.name="+metav1.NamespaceSystem).
			SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").Do(ctx).Raw()
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

// behind are those that have not been told of everything up to a revision.
func (c *Cluster) behind(revision int64) (out []trackedInformer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.tracked {
		synced, err := strconv.ParseInt(f.informer.LastSyncResourceVersion(), 10, 64)
		if err != nil || synced < revision {
			out = append(out, f)
		}
	}
	return out
}

// catchUp lists what an informer follows and hands it, in the watch that it has open, what it does not know; the watch
// then ends, and the informer goes on from the list's revision.
func (c *Cluster) catchUp(ctx context.Context, f trackedInformer) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout())
	defer cancel()
	url := f.path
	if f.query != "" {
		url += "?" + f.query
	}
	data, err := rpc.Hedged(ctx, listHedgeDelay, func(ctx context.Context) ([]byte, error) {
		return c.Client.CoreV1().RESTClient().Get().RequestURI(url).SetHeader("Accept",
			runtime.ContentTypeProtobuf).Do(ctx).Raw()
	})
	if err != nil {
		return err
	}
	obj, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), data)
	if err != nil {
		return err
	}
	list, err := meta.ListAccessor(obj)
	if err != nil {
		return err
	}
	items, err := meta.ExtractList(obj)
	if err != nil {
		return err
	}
	events, err := diff(items, f.informer.GetStore())
	if err != nil {
		return err
	}
	frames, err := encodeEvents(events, obj, list.GetResourceVersion())
	if err != nil {
		return err
	}
	return c.streams.inject(f.path, f.query, frames)
}

// describe names what is behind, and where it is.
func describe(behind []trackedInformer) []string {
	var out []string
	for _, f := range behind {
		out = append(out, f.path+"@"+f.informer.LastSyncResourceVersion())
	}
	return out
}

// diff are the events that lead from what a store has to what was listed.
func diff(items []runtime.Object, store cache.Store) ([]watch.Event, error) {
	var events []watch.Event
	listed := make(map[string]bool, len(items))
	for _, item := range items {
		m, err := meta.Accessor(item)
		if err != nil {
			return nil, err
		}
		key := cache.MetaObjectToName(m).String()
		listed[key] = true
		old, known, err := store.GetByKey(key)
		if err != nil {
			return nil, err
		}
		if !known {
			events = append(events, watch.Event{Type: watch.Added, Object: item})
			continue
		}
		if o, err := meta.Accessor(old); err != nil || o.GetResourceVersion() != m.GetResourceVersion() {
			events = append(events, watch.Event{Type: watch.Modified, Object: item})
		}
	}
	for _, key := range store.ListKeys() {
		if old, known, err := store.GetByKey(key); err == nil && known && !listed[key] {
			if obj, ok := old.(runtime.Object); ok {
				events = append(events, watch.Event{Type: watch.Deleted, Object: obj})
			}
		}
	}
	return events, nil
}
