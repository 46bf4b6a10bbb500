package watchfanout

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/logreader"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// unreachableNATS is a NATS server that refuses every connection.
type unreachableNATS struct{}

func (unreachableNATS) InProcessConn() (net.Conn, error) { return nil, errors.New("away") }

// fakeRegistry serves discovery with pods, and events in another etcd.
type fakeRegistry struct {
	registryv1.UnimplementedSourceServer
	registryv1.UnimplementedDiscoveryServer
}

func (fakeRegistry) Watch(
	_ *registryv1.DiscoveryRequest,
	s grpc.ServerStreamingServer[registryv1.DiscoveryResponse],
) error {
	if err := s.Send(served("other")); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// served returns discovery with a log of events.
func served(log string) *registryv1.DiscoveryResponse {
	return &registryv1.DiscoveryResponse{Logs: []string{"other"}, Resources: []*registryv1.APIResource{{
		Resource:        &commonv1.Resource{Version: "v1", Resource: "pods"},
		StorageResource: "pods",
	}, {
		Resource:        &commonv1.Resource{Version: "v1", Resource: "events"},
		StorageResource: "events",
		Log:             log,
	}}}
}

// newReplica returns a replica without a log: tests apply events by hand.
func newReplica(t *testing.T, flags ...string) *Service {
	t.Helper()
	p := rpc.NewInProcess(false)
	registryv1.RegisterSourceServer(p, fakeRegistry{})
	registryv1.RegisterDiscoveryServer(p, fakeRegistry{})
	c := NewConfig()
	fs := pflag.NewFlagSet("watchfanout", pflag.ContinueOnError)
	c.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	c.Log.Conn = unreachableNATS{}
	s, err := New(c, Deps{
		Source:    registryv1.NewSourceClient(p.Client("watchfanout")),
		Discovery: registryv1.NewDiscoveryClient(p.Client("watchfanout")),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.nats.Close)
	return s
}

// discover runs the replica's discovery until the end of the test, and waits for the first response.
func discover(t *testing.T, s *Service) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); s.discovery.Run(t.Context()) }()
	t.Cleanup(func() { <-done })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s.Ready().OnChange(ctx, func(why error) {
		if why == nil || !strings.HasPrefix(why.Error(), "discovery: ") {
			cancel()
		}
	})
}

// A replica is not ready before it has received discovery and has read the log. Its readiness names the missing
// condition.
func TestReadinessNamesTheMissingDependency(t *testing.T) {
	s := newReplica(t)
	if err := s.Ready().Err(); err == nil || !strings.HasPrefix(err.Error(), "discovery: ") {
		t.Errorf("%v", err)
	}
	discover(t, s)
	if err := s.Ready().Err(); err == nil || !strings.HasPrefix(err.Error(), "the event log: ") {
		t.Errorf("%v", err)
	}
}

// The status page has the replica's state as text and as JSON, and the metrics register.
func TestAReplicasPage(t *testing.T) {
	s := newReplica(t)
	s.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10, Epoch: "h"})
	s.cache.Apply(&logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        11,
		StorageResource: "pods",
		Namespace:       "x",
		Name:            "a",
		Epoch:           "h",
		Object:          &logv1.Object{Json: []byte(`{"metadata":{"name":"a","namespace":"x"}}`)},
	})
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	if text := w.Body.String(); !strings.Contains(text, "ready false, revision 11, -1 behind etcd") ||
		!strings.Contains(text, "\npods ") {
		t.Errorf("%s", text)
	}
	w = httptest.NewRecorder()
	if s.ServeHTTP(w, httptest.NewRequest("GET", logreader.DifferencesPage, nil)); w.Body.Len() > 0 {
		t.Errorf("without differences: %s", w.Body.String())
	}
	req := httptest.NewRequest("GET", "/", nil)
	req.Header.Set("Accept", "application/json")
	w = httptest.NewRecorder()
	s.ServeHTTP(w, req)
	var st Status
	if err := json.Unmarshal(w.Body.Bytes(), &st); err != nil || st.Ready || st.Revision != 11 ||
		len(st.Resources) != 1 || st.Resources[0].Events != 1 || st.Bytes == 0 {
		t.Errorf("%+v, %v", st, err)
	}
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(s.Collectors()...)
	families, err := r.Gather()
	if err != nil || len(families) < 6 {
		t.Errorf("%d families, %v", len(families), err)
	}
}

// stream is a client's end of a watch. It discards the frames.
type stream struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx context.Context
}

func (s stream) Context() context.Context             { return s.ctx }
func (s stream) Send(*watchfanoutv1.WatchFrame) error { return nil }

// Drain ends a replica's watches.
func TestDrain(t *testing.T) {
	s := newReplica(t)
	discover(t, s)
	s.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10, Epoch: "h"})
	s.Drain()
	err := s.Watch(&watchfanoutv1.WatchRequest{
		Query: &watchfanoutv1.Query{
			Resource: &commonv1.Resource{Version: "v1", Resource: "pods"},
			Output:   &registryv1.Output{MediaType: "application/json"},
		},
		ResourceVersion: "10",
	}, stream{ctx: t.Context()})
	if !errors.Is(err, rpc.ErrDraining) {
		t.Errorf("the watch ends with %v", err)
	}
}
