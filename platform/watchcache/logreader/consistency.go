package logreader

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"

	"watershed.dev/platform/watchcache/cache"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// consistencyCheckPeriod is how often a reader compares the keys and revisions of its objects with etcd's, as
	// kube-apiserver does (ConsistencyCheckPeriod in k8s.io/apiserver/pkg/storage/cacher).
	consistencyCheckPeriod = 5 * time.Minute
	// consistencyCheckJitter is the largest addition to consistencyCheckPeriod, as a share, so that replicas do not
	// read etcd together.
	consistencyCheckJitter = 0.5
	// consistencyCheckTimeout bounds the comparison of a resource.
	consistencyCheckTimeout = time.Minute
	// maxSampled bounds the objects of a resource whose values a comparison compares. maxSampledBytes bounds the bytes
	// of their JSON and protobuf, unless it is a single object.
	maxSampled      = 20
	maxSampledBytes = 1 << 20
	// maxNamed bounds the objects that a log line names.
	maxNamed = 5
	// maxDiffering bounds the bytes of Differing. A difference of more objects is cut.
	maxDiffering = 1 << 20
	// DifferencesPage is the page of the debug address that has Differing.
	DifferencesPage = "/differences"
)

// checkConsistency compares the loaded objects with etcd until ctx is done: all of them every consistencyCheckPeriod,
// and a resource that differs from the publisher's sums at once. The cache has reset the latter, and the comparison
// only names the objects. A cache of events only has no objects.
func (l *Reader) checkConsistency(ctx context.Context) error {
	tick := time.NewTicker(wait.Jitter(consistencyCheckPeriod, consistencyCheckJitter))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case s := <-l.cache.Differences():
			l.config.Differences.WithLabelValues(s.Resource()).Inc()
			if !s.Objects {
				slog.Error("Events differ from the publisher's sums", "resource", s.Resource(), "revision", s.Revision,
					"reset", s.Reset)
				continue
			}
			d, err := l.compareWithEtcd(ctx, s.Snapshot, nil)
			slog.Error("Objects differ from the publisher's sums", "resource", s.Resource(), "revision", s.Revision,
				"difference", d.String(), "reset", s.Reset, "objects", DifferencesPage, "error", err)
		case <-tick.C:
			tick.Reset(wait.Jitter(consistencyCheckPeriod, consistencyCheckJitter))
			for _, name := range l.cache.Loaded() {
				if _, err := l.checkResource(ctx, name); endsChecks(err) {
					break
				}
			}
		}
	}
}

// Comparison is the result of comparing the loaded objects with etcd's at the same revisions.
type Comparison struct {
	// Resources is the number of the compared resources, and Objects the number of their objects.
	Resources int `json:"resources"`
	Objects   int `json:"objects"`
	// Values is the number of objects whose values were compared too.
	Values int `json:"values,omitempty"`
	// Differences are the first maxReported resources with a difference.
	Differences []Difference `json:"differences,omitempty"`
	// Errors are the first maxReported reasons why a resource could not be compared.
	Errors []string `json:"errors,omitempty"`
	// Disabled reports that the feature gate DetectCacheInconsistency is off, or registry's release older.
	Disabled bool `json:"disabled,omitempty"`
}

// Difference is a resource whose objects differ from etcd's.
type Difference struct {
	Resource string `json:"resource"`
	Revision int64  `json:"revision"`
	// Missing objects are only in etcd, Extra objects only in the cache. Stale objects have another revision in etcd.
	// Altered objects have the same revision in etcd, and another value.
	Missing int `json:"missing,omitempty"`
	Extra   int `json:"extra,omitempty"`
	Stale   int `json:"stale,omitempty"`
	Altered int `json:"altered,omitempty"`
	// Reset is false if another difference has reset the resource shortly before (cache.Difference).
	Reset bool `json:"reset"`
}

// maxReported bounds the differences and the errors of a Comparison.
const maxReported = 20

// CompareWithEtcd compares the loaded objects with etcd now, and resets the resources that differ. A resource is
// compared for all concurrent callers together, a single resource at a time. The end of ctx is an error of the
// comparison.
func (l *Reader) CompareWithEtcd(ctx context.Context) *Comparison {
	all := &Comparison{}
	for _, name := range l.cache.Loaded() {
		c, err := l.checkResource(ctx, name)
		switch {
		case status.Code(err) == codes.Unimplemented:
			all.Disabled = true
			return all
		case err != nil:
			if len(all.Errors) < maxReported {
				all.Errors = append(all.Errors, fmt.Sprintf("%s: %v", name, err))
			}
			if ctx.Err() != nil || endsChecks(err) {
				return all
			}
		case c != nil:
			all.Resources++
			all.Objects += c.objects
			all.Values += c.difference.values
			if c.difference.count() > 0 && len(all.Differences) < maxReported {
				d := c.difference
				all.Differences = append(all.Differences, Difference{name, c.revision, d.missing, d.extra, d.stale,
					d.altered, c.reset})
			}
		}
	}
	return all
}

// checked is the result of the comparison of a resource.
type checked struct {
	revision   int64
	objects    int
	difference difference
	reset      bool
}

// checkResource compares a resource with etcd, and resets it if it differs. The result is nil if the resource is not
// loaded.
func (l *Reader) checkResource(ctx context.Context, name string) (*checked, error) {
	return l.checks.Get(ctx, name, func(ctx context.Context) (*checked, error) {
		s, ok := l.cache.Resource(name).Loaded()
		if !ok {
			return nil, nil
		}
		d, err := l.compareWithEtcd(ctx, s, sample(s))
		c := &checked{revision: s.Revision, objects: s.Len(), difference: d}
		result := "success"
		switch {
		case status.Code(err) == codes.Unimplemented: // the feature gate is off, or the registry is older
			return nil, err
		case err != nil:
			result = "error"
			slog.Warn("Objects cannot be compared with etcd", "resource", name, "revision", s.Revision, "error", err)
		case d.count() > 0:
			result = "failure"
			c.reset = s.ResetDiffering()
			l.config.Differences.WithLabelValues(name).Inc()
			slog.Error("Objects differ from etcd's", "resource", name, "revision", s.Revision,
				"difference", d.String(), "reset", c.reset, "objects", DifferencesPage)
		}
		gr := schema.ParseGroupResource(name)
		cachermetrics.StorageConsistencyCheckTotal.WithLabelValues(gr.Group, gr.Resource, result).Inc()
		return c, err
	})
}

// endsChecks reports whether an error keeps other resources from being compared now.
func endsChecks(err error) bool {
	code := status.Code(err)
	return code == codes.Unimplemented || code == codes.Unavailable || code == codes.DeadlineExceeded
}

// errOtherRevision means that the registry is of a release that reads the current revision only.
var errOtherRevision = status.Error(codes.Unimplemented, "the registry has read another revision")

// sample returns the keys of random objects, at most maxSampled.
func sample(s *cache.Snapshot) (keys []string) {
	var items []*cache.Item
	seen := 0
	for i := range s.Items() {
		seen++
		if len(items) < maxSampled {
			items = append(items, i)
		} else if n := rand.IntN(seen); n < maxSampled {
			items[n] = i
		}
	}
	rand.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
	total := 0
	for _, i := range items {
		size := i.JSONSize() + i.ProtobufSize()
		if len(keys) == 0 || total+size <= maxSampledBytes {
			keys, total = append(keys, i.Key), total+size
		}
	}
	return keys
}

// compareWithEtcd compares the keys and revisions of a snapshot with etcd's at the same revision, and the values of the
// keys in sample.
func (l *Reader) compareWithEtcd(ctx context.Context, s *cache.Snapshot, sample []string) (d difference, err error) {
	ctx, cancel := context.WithTimeout(ctx, consistencyCheckTimeout)
	defer cancel()
	next, stop := iter.Pull(s.Items())
	defer stop()
	item, more := next()
	err = l.source.ObjectKeys(ctx, s.Resource(), s.Revision, sample, func(row *registryv1.Row) {
		rowKey := cache.Key(row.Namespace, row.Name)
		for more && item.Key < rowKey {
			d.add(&d.extra, item.Key, item.Revision, 0, "")
			item, more = next()
		}
		switch {
		case more && item.Key == rowKey:
			if item.Revision != row.Revision {
				d.add(&d.stale, rowKey, item.Revision, row.Revision, "")
			} else if part, compared := item.DifferenceOf(row); compared {
				d.values++
				if part != "" {
					d.add(&d.altered, rowKey, item.Revision, row.Revision, part)
				}
			}
			item, more = next()
		case !s.IsUnreadable(rowKey):
			d.add(&d.missing, rowKey, 0, row.Revision, "")
		}
	})
	for err == nil && more {
		d.add(&d.extra, item.Key, item.Revision, 0, "")
		item, more = next()
	}
	if err == nil && d.altered > 0 {
		// registry may have read a CRD that is later than the snapshot. Its event resets the resource.
		if err = l.WaitUntilCurrent(ctx); err != nil || s.IsOutdated() {
			return difference{}, err
		}
	}
	if d.count() > 0 {
		l.differing.add(s, d.objects)
	}
	return d, err
}

// differing holds the objects of the newest differences as text, because a reset drops the objects. A difference that
// does not fit drops the former.
type differing struct {
	mu   sync.Mutex
	text []byte
}

func (o *differing) add(s *cache.Snapshot, objects []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.text)+len(objects) > maxDiffering {
		o.text = nil
	}
	o.text = fmt.Appendf(o.text, "%s, %s at revision %d: key, revision in the cache, revision in etcd (0: none), "+
		"part that differs at an equal revision\n%s",
		time.Now().UTC().Format(time.RFC3339), s.Resource(), s.Revision, objects)
}

// Differing returns the objects of the newest differences as text, with their revisions in the cache and in etcd.
func (l *Reader) Differing() string {
	l.differing.mu.Lock()
	defer l.differing.mu.Unlock()
	return string(l.differing.text)
}

// difference is the objects that differ from etcd's.
type difference struct {
	// missing are only in etcd, extra only in the cache, and stale of another revision in the cache. altered have
	// another value at the same revision.
	missing, extra, stale, altered int
	// values is the number of objects whose values were compared.
	values int
	names  []string
	// objects has a line for each object, with its revisions in the cache and in etcd. It has no contents, because they
	// may be secret.
	objects []byte
}

func (d *difference) add(to *int, key string, cached, etcd int64, part string) {
	*to++
	if len(d.names) < maxNamed {
		d.names = append(d.names, key)
	}
	if len(d.objects) < maxDiffering {
		d.objects = append(bytes.TrimRight(fmt.Appendf(d.objects, "%q %d %d %s", key, cached, etcd, part), " "), '\n')
	}
}

func (d *difference) count() int { return d.missing + d.extra + d.stale + d.altered }

func (d *difference) String() string {
	return fmt.Sprintf("%d objects are missing, %d do not exist, %d are of another revision, %d have another value, "+
		"such as %q", d.missing, d.extra, d.stale, d.altered, d.names)
}
