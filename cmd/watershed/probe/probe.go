// Package probe measures the service that clients of the cluster receive. It writes a ConfigMap through the front door
// and watches it there. It measures the age of each event, missing events, events out of order, and the latency of
// writes.
//
// Run owns two goroutines: the writer and the watcher. Both end with its context.
package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"watershed.dev/platform/lifecycle"
)

var (
	buckets  = prometheus.ExponentialBuckets(0.001, 2, 16)
	eventAge = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "watershed_probe_event_age_seconds",
		Help:    "Time in seconds from the probe's write to its event at the probe's watch.",
		Buckets: buckets,
	})
	writeLatency = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "watershed_probe_write_seconds",
		Help:    "Duration in seconds of the probe's successful writes.",
		Buckets: buckets,
	})
	outcomes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_probe_events_total",
		Help: "Events of the probe's writes, by result: received, missing (not within the timeout) or out_of_order.",
	}, []string{"result"})
	failures = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_probe_failures_total",
		Help: "Failed operations of the probe: write or watch.",
	}, []string{"operation"})
)

// Metrics returns the collectors of the package. It creates every series, because Prometheus' increase() ignores the
// first value of a series.
func Metrics() []prometheus.Collector {
	for _, result := range []string{"received", "missing", "out_of_order"} {
		outcomes.WithLabelValues(result)
	}
	for _, operation := range []string{"write", "watch"} {
		failures.WithLabelValues(operation)
	}
	return []prometheus.Collector{eventAge, writeLatency, outcomes, failures}
}

// Probe writes and watches until Run's context is done.
type Probe struct {
	Client    kubernetes.Interface
	Namespace string
	// Name is the name of the ConfigMap, which Run creates and deletes. No other client has it.
	Name string
	// Interval is the time between writes. Timeout is how long an event may take before it is missing.
	Interval, Timeout time.Duration

	// opened is closed when the first watch is open. Writes begin then, or after Timeout.
	opened chan struct{}
	open   sync.Once

	mu      sync.Mutex
	pending map[int]time.Time // when the write of a sequence number began
	last    int               // the highest sequence number of an event
	result  Result
	ages    []float64
	writes  []float64
}

// Result has the measurements of a probe. Durations are in seconds.
type Result struct {
	Writes       int `json:"writes"`
	FailedWrites int `json:"failedWrites"`
	// Events counts received events, and Missing the events that did not arrive within the timeout.
	Events     int `json:"events"`
	Missing    int `json:"missing"`
	OutOfOrder int `json:"outOfOrder"`
	// Watches counts the watches that were opened: 2 or more mean that a watch ended.
	Watches  int     `json:"watches"`
	AgeP50   float64 `json:"ageP50"`
	AgeP99   float64 `json:"ageP99"`
	WriteP50 float64 `json:"writeP50"`
	WriteP99 float64 `json:"writeP99"`
}

// maxSamples bounds the durations that a result is computed from: the newest count.
const maxSamples = 10_000

// key is the key of the sequence number in the ConfigMap.
const key = "sequence"

// Run writes and watches until ctx is done, waits for the last events, and deletes the ConfigMap. writes is the number
// of writes after which it ends, or at a failed creation of the ConfigMap; 0: it ends with ctx.
func (p *Probe) Run(ctx context.Context, writes int) (Result, error) {
	p.pending, p.opened = map[int]time.Time{}, make(chan struct{})
	maps := p.Client.CoreV1().ConfigMaps(p.Namespace)
	defer func() {
		deleteCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Timeout)
		defer cancel()
		_ = maps.Delete(deleteCtx, p.Name, metav1.DeleteOptions{})
	}()
	m, err := p.create(ctx, maps, writes == 0)
	if ctx.Err() != nil {
		return p.Result(), nil
	}
	if err != nil {
		return p.Result(), fmt.Errorf("create the ConfigMap %s/%s: %w", p.Namespace, p.Name, err)
	}
	watchCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() { defer close(ended); p.watch(watchCtx, maps, m.ResourceVersion) }()
	select {
	case <-p.opened:
	case <-time.After(p.Timeout):
	case <-ctx.Done():
	}
	p.write(ctx, maps, writes)
	p.drain(watchCtx)
	cancel()
	<-ended
	return p.Result(), nil
}

func (p *Probe) configMap(sequence int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Name:   p.Name,
			Labels: map[string]string{"app.kubernetes.io/managed-by": "watershed-probe"},
		},
		Data: map[string]string{key: strconv.Itoa(sequence)},
	}
}

// create creates the ConfigMap. With repeat, it repeats a failed request at each interval until ctx is done, and counts
// it: a probe that starts during an outage has metrics of it.
func (p *Probe) create(ctx context.Context, maps typedcorev1.ConfigMapInterface,
	repeat bool) (*corev1.ConfigMap, error) {
	for {
		m, err := p.createOnce(ctx, maps)
		if err == nil || !repeat {
			return m, err
		}
		p.failed(ctx, err)
		if lifecycle.Sleep(ctx, p.Interval) != nil {
			return nil, err
		}
	}
}

// createOnce creates the ConfigMap, or updates the ConfigMap of an earlier request whose response was lost.
func (p *Probe) createOnce(ctx context.Context, maps typedcorev1.ConfigMapInterface) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	m, err := maps.Create(ctx, p.configMap(0), metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		m, err = maps.Update(ctx, p.configMap(0), metav1.UpdateOptions{})
	}
	return m, err
}

// failed counts a write that failed, unless ctx is done.
func (p *Probe) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	failures.WithLabelValues("write").Inc()
	p.result.FailedWrites++
	slog.Warn("A write failed", "error", err)
}

// write updates the ConfigMap at each interval.
func (p *Probe) write(ctx context.Context, maps typedcorev1.ConfigMapInterface, writes int) {
	tick := time.NewTicker(p.Interval)
	defer tick.Stop()
	for n := 1; writes == 0 || n <= writes; n++ {
		p.mu.Lock()
		p.pending[n] = time.Now()
		p.mu.Unlock()
		p.update(ctx, maps, n)
		p.expire(p.Timeout)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// update writes a sequence number. A failed update may have been written, so its event may arrive, and is not required.
func (p *Probe) update(ctx context.Context, maps typedcorev1.ConfigMapInterface, n int) {
	writeCtx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	began := time.Now()
	_, err := maps.Update(writeCtx, p.configMap(n), metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) { // it was deleted
		_, err = maps.Create(writeCtx, p.configMap(n), metav1.CreateOptions{})
	}
	if err != nil {
		p.mu.Lock()
		delete(p.pending, n)
		p.mu.Unlock()
		p.failed(ctx, err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.result.Writes++
	writeLatency.Observe(time.Since(began).Seconds())
	p.writes = keep(p.writes, time.Since(began))
}

// watch receives the events of the ConfigMap, from a revision on, until ctx is done.
func (p *Probe) watch(ctx context.Context, maps typedcorev1.ConfigMapInterface, revision string) {
	for ctx.Err() == nil {
		next, err := p.watchOnce(ctx, maps, revision)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			failures.WithLabelValues("watch").Inc()
			slog.Warn("The watch ended", "error", err)
		}
		revision = next
		_ = lifecycle.Sleep(ctx, 100*time.Millisecond)
	}
}

// watchOnce opens a watch, and returns the revision of its last event.
func (p *Probe) watchOnce(ctx context.Context, maps typedcorev1.ConfigMapInterface, revision string) (string, error) {
	w, err := maps.Watch(ctx, metav1.ListOptions{
		FieldSelector:       "metadata.name=" + p.Name,
		ResourceVersion:     revision,
		AllowWatchBookmarks: true,
	})
	if err != nil {
		return revision, err
	}
	defer w.Stop()
	p.open.Do(func() { close(p.opened) })
	p.mu.Lock()
	p.result.Watches++
	p.mu.Unlock()
	defer context.AfterFunc(ctx, w.Stop)()
	for e := range w.ResultChan() {
		m, ok := e.Object.(*corev1.ConfigMap)
		if !ok {
			return "", fmt.Errorf("the watch received %s: %w", e.Type, apierrors.FromObject(e.Object))
		}
		revision = m.ResourceVersion
		if n, err := strconv.Atoi(m.Data[key]); err == nil && (e.Type == watch.Added || e.Type == watch.Modified) {
			p.received(n)
		}
	}
	return revision, nil
}

// received records the event of a write.
func (p *Probe) received(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n < p.last {
		p.result.OutOfOrder++
		outcomes.WithLabelValues("out_of_order").Inc()
	}
	p.last = max(p.last, n)
	began, ok := p.pending[n]
	if !ok {
		return
	}
	delete(p.pending, n)
	p.result.Events++
	outcomes.WithLabelValues("received").Inc()
	eventAge.Observe(time.Since(began).Seconds())
	p.ages = keep(p.ages, time.Since(began))
}

// expire counts the writes that are older than age and have no event.
func (p *Probe) expire(age time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n, began := range p.pending {
		if time.Since(began) >= age {
			delete(p.pending, n)
			p.result.Missing++
			outcomes.WithLabelValues("missing").Inc()
		}
	}
}

// drain waits for the events of the last writes, at most for the timeout.
func (p *Probe) drain(ctx context.Context) {
	deadline := time.After(p.Timeout)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		p.mu.Lock()
		left := len(p.pending)
		p.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-deadline:
			p.expire(0)
			return
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Result returns the measurements so far.
func (p *Probe) Result() Result {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.result
	r.AgeP50, r.AgeP99 = quantile(p.ages, 50), quantile(p.ages, 99)
	r.WriteP50, r.WriteP99 = quantile(p.writes, 50), quantile(p.writes, 99)
	return r
}

func keep(all []float64, d time.Duration) []float64 {
	if len(all) == maxSamples {
		all = slices.Delete(all, 0, maxSamples/2)
	}
	return append(all, d.Seconds())
}

// quantile returns a percentile, or 0 without samples.
func quantile(all []float64, percent int) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

// Limits are the bounds of a result.
type Limits struct {
	AgeP99, WriteP99 time.Duration
}

// Breach returns an error that names each exceeded bound, or nil.
func (l Limits) Breach(r Result) error {
	var errs []error
	breach := func(exceeded bool, text string, args ...any) {
		if exceeded {
			errs = append(errs, fmt.Errorf(text, args...))
		}
	}
	breach(r.Events == 0, "no event was received")
	breach(r.FailedWrites > 0, "%d writes failed", r.FailedWrites)
	breach(r.Missing > 0, "%d events are missing", r.Missing)
	breach(r.OutOfOrder > 0, "%d events are out of order", r.OutOfOrder)
	breach(r.AgeP99 > l.AgeP99.Seconds(), "the 99th percentile of the age of events is %.3f s: want --max-event-age %s",
		r.AgeP99, l.AgeP99)
	breach(r.WriteP99 > l.WriteP99.Seconds(), "the 99th percentile of writes is %.3f s: want --max-write-latency %s",
		r.WriteP99, l.WriteP99)
	return errors.Join(errs...)
}
