package cluster

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

const (
	// objects are what is written, in turns.
	objects = 10
	// writePause is the pause between two writes.
	writePause = 20 * time.Millisecond
	// patience is how long a write is tried again.
	patience = 60 * time.Second
)

// noticed is what clients noticed of one phase.
type noticed struct {
	writes, retried, failed   int
	events, resumed, relisted int
	// oldest is the largest age of an event when its client had it, and longest what a write took with all its
	// attempts.
	oldest, longest time.Duration
}

// clients are a writer and many watchers, which check that each of them sees every write in order.
type clients struct {
	client kubernetes.Interface

	mu     sync.Mutex
	now    noticed
	wrong  []string
	wrote  [objects]int
	seen   []*[objects]int // by watcher
	finish context.CancelFunc
	done   sync.WaitGroup
	// endWrites ends the writer alone, and written waits for it.
	endWrites context.CancelFunc
	written   sync.WaitGroup
}

// start begins to write and to watch.
func start(
	ctx context.Context,
	client kubernetes.Interface,
	dial func() kubernetes.Interface,
	watchers int,
) (*clients, error) {
	c := &clients{client: client}
	for i := range objects {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name(i)}, Data: map[string]string{"n": "0"}}
		if _, err := client.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
	}
	ctx, c.finish = context.WithCancel(ctx)
	for range watchers {
		seen := new([objects]int)
		c.seen = append(c.seen, seen)
		own := dial()
		c.done.Go(func() { c.watch(ctx, own, seen) })
	}
	writes, end := context.WithCancel(ctx)
	c.endWrites = end
	c.written.Go(func() { c.write(writes) })
	return c, nil
}

func name(i int) string { return fmt.Sprintf("written-%d", i) }

// phase answers what was noticed since it was called last.
func (c *clients) phase() noticed {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.now
	c.now = noticed{}
	return n
}

// write writes until ctx is done. A write that fails is tried again.
func (c *clients) write(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		i := n % objects
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
			c.wrong = append(c.wrong, fmt.Sprintf("a write failed for %s: %v", patience, err))
		}
		c.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(writePause):
		}
	}
}

func (c *clients) writeOne(ctx context.Context, i, n int) (retried bool, err error) {
	for began := time.Now(); time.Since(began) < patience && ctx.Err() == nil; retried = true {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		patch := fmt.Sprintf(`{"data":{"n":"%d","at":"%d"}}`, n, time.Now().UnixNano())
		_, err = c.client.CoreV1().ConfigMaps("default").Patch(attempt, name(i), "application/merge-patch+json",
			[]byte(patch), metav1.PatchOptions{})
		cancel()
		if err == nil {
			return retried, nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return retried, err
}

// watch watches until ctx is done, as an informer does: a watch that ends goes on from the last revision, and only
// where that is gone is everything listed again.
func (c *clients) watch(ctx context.Context, client kubernetes.Interface, seen *[objects]int) {
	revision := ""
	for ctx.Err() == nil {
		if revision == "" {
			list, err := client.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{ResourceVersion: "0"})
			if err != nil {
				c.pause(ctx)
				continue
			}
			revision = list.ResourceVersion
			for _, cm := range list.Items {
				c.saw(&cm, seen, true)
			}
		}
		w, err := client.CoreV1().ConfigMaps("default").Watch(ctx, metav1.ListOptions{
			ResourceVersion:     revision,
			AllowWatchBookmarks: true,
		})
		if err == nil {
			revision, err = c.follow(w, revision, seen)
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
		c.pause(ctx)
	}
}

func (c *clients) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(100 * time.Millisecond):
	}
}

// follow reads a watch to its end; the error is the one that the server sent, if any.
func (c *clients) follow(w watch.Interface, revision string, seen *[objects]int) (string, error) {
	for e := range w.ResultChan() {
		if e.Type == watch.Error {
			return revision, apierrors.FromObject(e.Object)
		}
		cm, ok := e.Object.(*corev1.ConfigMap)
		if !ok {
			continue
		}
		revision = cm.ResourceVersion
		if e.Type == watch.Modified {
			c.saw(cm, seen, false)
		}
	}
	return revision, nil
}

// saw checks an object against what its watcher has seen of it: the next write, or with a list a later one.
func (c *clients) saw(cm *corev1.ConfigMap, seen *[objects]int, listed bool) {
	i, err := strconv.Atoi(strings.TrimPrefix(cm.Name, "written-"))
	if err != nil || i >= objects {
		return
	}
	n, _ := strconv.Atoi(cm.Data["n"])
	at, _ := strconv.ParseInt(cm.Data["at"], 10, 64)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !listed {
		c.now.events++
		c.now.oldest = max(c.now.oldest, time.Since(time.Unix(0, at)))
	}
	// a write whose answer was lost is sent again with the same number
	if before := seen[i]; n < before || !listed && n > before+1 {
		c.wrong = append(c.wrong, fmt.Sprintf("%s: %d was seen after %d (listed: %v)", cm.Name, n, before, listed))
	}
	seen[i] = n
}

// stop ends the writer, waits until every watcher has seen its last writes, and answers what was wrong.
func (c *clients) stop() []string {
	c.endWrites()
	c.written.Wait()
	wrote := c.writes()
	var missing error
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
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

// writes are how often each object has been written.
func (c *clients) writes() [objects]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wrote
}

// missing says which watcher has not seen what was written.
func (c *clients) missing(wrote [objects]int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w, seen := range c.seen {
		for i, n := range seen {
			if n < wrote[i] {
				return fmt.Errorf("watcher %d has seen %d of %d writes of %s", w, n, wrote[i], name(i))
			}
		}
	}
	return nil
}
