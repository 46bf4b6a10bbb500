package probe

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// The probe receives an event for each write, and deletes its ConfigMap.
func TestProbe(t *testing.T) {
	client := fake.NewClientset()
	p := &Probe{Client: client, Namespace: "x", Name: "p", Interval: time.Millisecond, Timeout: 10 * time.Second}
	r, err := p.Run(t.Context(), 10)
	limits := Limits{AgeP99: time.Minute, WriteP99: time.Minute}
	if err != nil || r.Writes != 10 || r.FailedWrites != 0 || r.OutOfOrder != 0 || limits.Breach(r) != nil {
		t.Errorf("%+v, %v, %v", r, err, limits.Breach(r))
	}
	last := client.Actions()[len(client.Actions())-1]
	if !last.Matches("delete", "configmaps") {
		t.Errorf("the last action is %v", last)
	}
}

// A write that fails, an event that does not arrive, and an event out of order are counted.
func TestProbeCountsFaults(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("update", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("no")
	})
	p := &Probe{Client: client, Namespace: "x", Name: "p", Interval: time.Millisecond, Timeout: time.Second}
	if r, err := p.Run(t.Context(), 3); err != nil || r.FailedWrites != 3 || r.Missing != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	p = &Probe{pending: map[int]time.Time{1: time.Now(), 2: time.Now(), 3: time.Now()}}
	p.received(2)
	p.received(1)
	p.received(1)
	p.expire(0)
	if r := p.Result(); r.Events != 2 || r.OutOfOrder != 2 || r.Missing != 1 {
		t.Errorf("%+v", r)
	}
}

// A probe that starts during an outage counts the failures, and writes after the outage. The server may have created
// the ConfigMap of a failed request. With a number of writes, the probe ends with the error.
func TestProbeStartsDuringAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := testutil.ToFloat64(failures.WithLabelValues("write"))
		client, requests := fake.NewClientset(), 0
		outage := errors.New("the outage")
		client.PrependReactor("create", "configmaps", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if requests++; requests == 5 { // the response is lost
				m := a.(clienttesting.CreateAction).GetObject()
				_ = client.Tracker().Create(a.GetResource(), m, a.GetNamespace())
			}
			return requests <= 5, nil, outage
		})
		p := &Probe{Client: client, Namespace: "x", Name: "p", Interval: time.Second, Timeout: 10 * time.Second}
		ctx, cancel := context.WithTimeout(t.Context(), 20500*time.Millisecond)
		defer cancel()
		r, err := p.Run(ctx, 0)
		if counted := testutil.ToFloat64(failures.WithLabelValues("write")) - before; err != nil || counted != 5 ||
			r.FailedWrites != 5 || r.Writes < 10 || r.Missing != 0 {
			t.Errorf("%v failures, %+v, %v", counted, r, err)
		}
		requests = 0
		if _, err := p.Run(t.Context(), 1); !errors.Is(err, outage) {
			t.Error(err)
		}
	})
}

// Every series of a counter exists before its first incident.
func TestMetricsBeginWithEverySeries(t *testing.T) {
	r := prometheus.NewRegistry()
	r.MustRegister(Metrics()...)
	for name, want := range map[string]int{"watershed_probe_events_total": 3, "watershed_probe_failures_total": 2} {
		if got, err := testutil.GatherAndCount(r, name); err != nil || got != want {
			t.Errorf("%s has %d series, want %d: %v", name, got, want, err)
		}
	}
}

// A breach names each exceeded bound.
func TestBreach(t *testing.T) {
	l := Limits{AgeP99: time.Second, WriteP99: time.Second}
	if err := l.Breach(Result{Events: 1, AgeP99: 0.5, WriteP99: 0.5}); err != nil {
		t.Error(err)
	}
	err := l.Breach(Result{Missing: 2, OutOfOrder: 1, FailedWrites: 3, AgeP99: 2, WriteP99: 3})
	for _, want := range []string{"no event", "3 writes failed", "2 events are missing", "1 events are out of order",
		"--max-event-age 1s", "--max-write-latency 1s"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
}
