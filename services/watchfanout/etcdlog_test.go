package watchfanout

import (
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// A resource of another etcd has a cache of its own. Its calls are rejected until its log is read to the end, and the
// replica is ready without it.
func TestResourcesOfAnotherEtcd(t *testing.T) {
	s := newReplica(t)
	events := &commonv1.Resource{Version: "v1", Resource: "events"}
	if _, err := s.logOf(events); err == nil {
		t.Error("the log is known before discovery")
	}
	discover(t, s)
	if l, err := s.logOf(&commonv1.Resource{Version: "v1", Resource: "pods"}); err != nil || l != s.etcdLog {
		t.Errorf("pods: %v", err)
	}
	q := &watchfanoutv1.Query{Resource: events}
	if err := s.List(&watchfanoutv1.ListRequest{Query: q}, nil); !errors.Is(err, rpc.ErrDelegate) {
		t.Errorf("the list: %v", err)
	}
	err := s.Watch(&watchfanoutv1.WatchRequest{Query: q}, stream{ctx: t.Context()})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the watch: %v", err)
	}
	other := <-s.added
	other.own.Ready.Set("the event log", nil)
	if l, err := s.logOf(events); err != nil || l != other {
		t.Errorf("events: %v", err)
	}
	other.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10, Epoch: "h"})
	if s.cache.Progress() != 0 {
		t.Error("the main log has the revision of another etcd")
	}
	r := prometheus.NewRegistry()
	r.MustRegister(s.Collectors()...)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "watershed_watchfanout_revision" && len(f.Metric) != 2 {
			t.Errorf("%v", f)
		}
	}
}

// A replica ends if registry serves a resource from another etcd than before.
func TestAMovedResourceEndsTheReplica(t *testing.T) {
	s := newReplica(t)
	discover(t, s)
	s.discovered(discovery.NewView(served("other")))
	select {
	case err := <-s.moved:
		t.Errorf("an equal view: %v", err)
	default:
	}
	s.discovered(discovery.NewView(served("")))
	if err := s.Run(t.Context()); err == nil || t.Context().Err() != nil {
		t.Errorf("the replica ends with %v", err)
	}
}
