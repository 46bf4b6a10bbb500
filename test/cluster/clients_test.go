package cluster

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

const (
	// writePause is the default pause between two writes.
	writePause = 20 * time.Millisecond
	// writeTimeout is how long a write is retried. All pods start again within it.
	writeTimeout = 3 * time.Minute
	// connections is the number of connections, if the clients' configuration has a Dial function.
	connections = 8
	// object is the name of each written object.
	object = "written"
)

// kinds are the kinds of the written objects, with the fields that they need beside metadata.
var kinds = []struct {
	resource   schema.GroupVersionResource
	kind, spec string
}{
	{schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, "ConfigMap", ""},
	{schema.GroupVersionResource{Version: "v1", Resource: "secrets"}, "Secret", ""},
	{schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}, "ServiceAccount", ""},
	{schema.GroupVersionResource{Version: "v1", Resource: "limitranges"}, "LimitRange", `, "spec": {"limits": []}`},
	{schema.GroupVersionResource{Version: "v1", Resource: "podtemplates"}, "PodTemplate",
		`, "template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}`},
	{schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}, "Lease", ""},
	{schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"}, "Role", ""},
	{schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "controllerrevisions"}, "ControllerRevision",
		`, "revision": 1, "data": {}`},
	{schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"},
		"NetworkPolicy", `, "spec": {"podSelector": {}}`},
	{schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"},
		"EndpointSlice", `, "addressType": "IPv4", "endpoints": []`},
}

// noticed are the effects on clients in one phase.
type noticed struct {
	writes, retried, failed   int
	events, resumed, relisted int
	// oldest is the largest age of an event on arrival. longest is the longest time of a write with all its attempts.
	oldest, longest time.Duration
}

// clients are one writer and many watchers, each of one resource. Each watcher checks that it receives every write of
// its resource in order.
type clients struct {
	// connections are clients with a connection each. The watchers share them.
	connections []metadata.Interface
	pause       time.Duration

	mu    sync.Mutex
	now   noticed
	wrong []string
	wrote []int
	seen  []int // by watcher
	// unknown are the writes by kind with an attempt of unknown result, which may come after the next write.
	unknown []map[int]bool
	finish  context.CancelFunc
	done    sync.WaitGroup
	// endWrites ends only the writer, and writing waits for its end.
	endWrites context.CancelFunc
	writing   sync.WaitGroup
}

// start starts the writer, with a pause between two writes, and the watchers.
func start(ctx context.Context, config *rest.Config, watchers int, pause time.Duration) (*clients, error) {
	c := &clients{pause: pause, wrote: make([]int, len(kinds)), seen: make([]int, watchers)}
	for range kinds {
		c.unknown = append(c.unknown, map[int]bool{})
	}
	for range connections {
		one := rest.CopyConfig(config)
		if dial := config.Dial; dial != nil { // client-go shares a connection between equal configurations
			one.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				return dial(ctx, network, address)
			}
		}
		client, err := metadata.NewForConfig(one)
		if err != nil {
			return nil, err
		}
		c.connections = append(c.connections, client)
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	for _, w := range kinds {
		text := fmt.Sprintf(`{"apiVersion": %q, "kind": %q, "metadata": {"name": %q, "annotations": {"n": "0"}}%s}`,
			w.resource.GroupVersion(), w.kind, object, w.spec)
		u := &unstructured.Unstructured{}
		if err := u.UnmarshalJSON([]byte(text)); err != nil {
			return nil, err
		}
		_, err := objects.Resource(w.resource).Namespace("default").Create(ctx, u, metav1.CreateOptions{})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.kind, err)
		}
	}
	ctx, c.finish = context.WithCancel(ctx)
	for i := range watchers {
		c.done.Go(func() { c.watch(ctx, i) })
	}
	writes, end := context.WithCancel(ctx)
	c.endWrites = end
	c.writing.Go(func() { c.write(writes) })
	return c, nil
}

// resourceFor returns the resource of a watcher.
func (c *clients) resourceFor(watcher int) metadata.ResourceInterface {
	client := c.connections[watcher/len(kinds)%len(c.connections)]
	return client.Resource(kinds[watcher%len(kinds)].resource).Namespace("default")
}

// phase returns the effects since its last call.
func (c *clients) phase() noticed {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.now
	c.now = noticed{}
	return n
}

// write writes until ctx is done. It retries failed writes.
func (c *clients) write(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		i := n % len(kinds)
		began := time.Now()
		retried, err := c.writeOne(ctx, i, c.wrote[i]+1)
		c.mu.Lock()
		c.now.writes++
		c.now.longest = max(c.now.longest, time.Since(began))
		if retried {
			c.now.retried++
		}
		if err == nil {
			c.wrote[i]++
		} else if ctx.Err() == nil {
			c.now.failed++
			c.wrong = append(c.wrong, fmt.Sprintf("a write failed for %s: %v", writeTimeout, err))
		}
		c.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(c.pause):
		}
	}
}

func (c *clients) writeOne(ctx context.Context, i, n int) (retried bool, err error) {
	for began := time.Now(); time.Since(began) < writeTimeout && ctx.Err() == nil; retried = true {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"n":"%d","at":"%d"}}}`, n, time.Now().UnixNano())
		_, err = c.resourceFor(i).
			Patch(attempt, object, "application/merge-patch+json", []byte(patch), metav1.PatchOptions{})
		cancel()
		if err == nil {
			return retried, nil
		}
		c.mu.Lock()
		c.unknown[i][n] = true
		c.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return retried, err
}

// watch watches until ctx is done, as an informer does. It resumes an ended watch from the last revision, and lists
// again only if that revision is gone.
func (c *clients) watch(ctx context.Context, watcher int) {
	revision := ""
	for ctx.Err() == nil {
		if revision == "" {
			list, err := c.resourceFor(watcher).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
			if err != nil {
				breathe(ctx)
				continue
			}
			revision = list.ResourceVersion
			for i := range list.Items {
				c.saw(&list.Items[i], watcher, true)
			}
		}
		w, err := c.resourceFor(watcher).
			Watch(ctx, metav1.ListOptions{ResourceVersion: revision, AllowWatchBookmarks: true})
		if err == nil {
			revision, err = c.follow(w, revision, watcher)
			w.Stop()
		}
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			c.now.relisted++
			revision = ""
		} else {
			c.now.resumed++
		}
		c.mu.Unlock()
		breathe(ctx)
	}
}

// breathe waits briefly before a retry.
func breathe(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(100 * time.Millisecond):
	}
}

// follow reads a watch to its end. It returns the server's error, if any.
func (c *clients) follow(w watch.Interface, revision string, watcher int) (string, error) {
	for e := range w.ResultChan() {
		if e.Type == watch.Error {
			return revision, apierrors.FromObject(e.Object)
		}
		o, ok := e.Object.(*metav1.PartialObjectMetadata)
		if !ok {
			continue
		}
		revision = o.ResourceVersion
		if e.Type == watch.Modified {
			c.saw(o, watcher, false)
		}
	}
	return revision, nil
}

// saw checks an object against the watcher's last one: it must be the next write, or in a list a later write.
func (c *clients) saw(o *metav1.PartialObjectMetadata, watcher int, listed bool) {
	if o.Name != object {
		return
	}
	n, _ := strconv.Atoi(o.Annotations["n"])
	at, _ := strconv.ParseInt(o.Annotations["at"], 10, 64)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !listed {
		c.now.events++
		c.now.oldest = max(c.now.oldest, time.Since(time.Unix(0, at)))
	}
	if n < c.seen[watcher] && c.unknown[watcher%len(kinds)][n] {
		return
	}
	// a write without a response is sent again with the same number
	if before := c.seen[watcher]; n < before || !listed && n > before+1 {
		c.wrong = append(c.wrong, fmt.Sprintf("%s: watcher %d saw %d after %d (listed: %v)",
			kinds[watcher%len(kinds)].kind, watcher, n, before, listed))
	}
	c.seen[watcher] = n
}

// stop ends the writer, waits until every watcher has received the last writes, and returns the errors.
func (c *clients) stop() []string {
	c.endWrites()
	c.writing.Wait()
	wrote := c.writes()
	var missing error
	for deadline := time.Now().Add(harness.Soon); ; time.Sleep(50 * time.Millisecond) {
		if missing = c.missing(wrote); missing == nil || time.Now().After(deadline) {
			break
		}
	}
	c.finish()
	c.done.Wait()
	if missing != nil {
		c.wrong = append(c.wrong, missing.Error())
	}
	return c.wrong
}

// writes returns the number of writes of each object.
func (c *clients) writes() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.wrote)
}

// missing returns an error that names a watcher without the last write.
func (c *clients) missing(wrote []int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w, n := range c.seen {
		if i := w % len(kinds); n < wrote[i] {
			return fmt.Errorf("watcher %d has seen %d of %d writes of its %s", w, n, wrote[i], kinds[i].kind)
		}
	}
	return nil
}
