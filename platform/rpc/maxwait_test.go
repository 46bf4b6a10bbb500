package rpc

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"watershed.dev/platform/lifecycle"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// soleReplica is the only replica of registry. It needs responseTime for a response.
type soleReplica struct {
	network atomic.Pointer[bufconn.Listener]
	server  *grpc.Server
	health  *health.Server
}

const responseTime = 30 * time.Second

func (s *soleReplica) start() {
	s.server, s.health = grpc.NewServer(), health.NewServer()
	s.ready()
	healthv1.RegisterHealthServer(s.server, s.health)
	registryv1.RegisterObjectsServer(s.server, &fake{get: func(ctx context.Context,
		_ *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return &registryv1.ObjectResponse{}, lifecycle.Sleep(ctx, responseTime)
	}})
	l := bufconn.Listen(1 << 16)
	s.network.Store(l)
	go func() { _ = s.server.Serve(l) }()
}

func (s *soleReplica) ready() {
	s.health.SetServingStatus("registry", healthv1.HealthCheckResponse_SERVING)
}

func (s *soleReplica) drain() {
	s.health.SetServingStatus("registry", healthv1.HealthCheckResponse_NOT_SERVING)
}

// stop breaks the replica's connections.
func (s *soleReplica) stop() {
	if s.server != nil {
		s.server.Stop()
	}
}

// dial returns a connection with the balancer and the retries of Dial.
func (s *soleReplica) dial(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///registry",
		grpc.WithChainUnaryInterceptor(trackUnary),
		grpc.WithDefaultServiceConfig(serviceConfig("registry")),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffConfig}),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if l := s.network.Load(); l != nil {
				return l.DialContext(ctx)
			}
			return nil, errors.New("connection refused")
		}))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// event is a change of the replica, seconds after the call.
type event struct {
	second time.Duration
	do     func(*soleReplica)
}

// A call fails after its bound without a ready replica, also if it has lost its replica. The time at a replica does not
// count, also if the replica drains. An earlier deadline has its own error.
func TestTheWaitForAReplicaIsBounded(t *testing.T) {
	const maxWait = 10 * time.Second
	start, ready, drain, stop := (*soleReplica).start, (*soleReplica).ready, (*soleReplica).drain, (*soleReplica).stop
	for name, c := range map[string]struct {
		events   []event
		deadline time.Duration // in seconds, as ends
		code     codes.Code
		ends     time.Duration // 0: not compared
	}{
		"none":                {nil, 35, codes.Unavailable, 10},
		"none, and deadline":  {nil, 5, codes.DeadlineExceeded, 5},
		"unready":             {[]event{{0, start}, {0, drain}}, 35, codes.Unavailable, 10},
		"ready":               {[]event{{0, start}}, 35, codes.OK, 0},
		"ready, and deadline": {[]event{{0, start}}, 20, codes.DeadlineExceeded, 20},
		"started":             {[]event{{8, start}}, 60, codes.OK, 0},
		"ready later":         {[]event{{0, start}, {0, drain}, {8, ready}}, 60, codes.OK, 0},
		"drained":             {[]event{{0, start}, {1, drain}}, 35, codes.OK, 0},
		"lost":                {[]event{{0, start}, {20, stop}}, 60, codes.Unavailable, 30},
		"lost, and deadline":  {[]event{{0, start}, {20, stop}}, 25, codes.DeadlineExceeded, 25},
		"replaced":            {[]event{{0, start}, {20, stop}, {28, start}}, 90, codes.OK, 0},
		"replaced and lost":   {[]event{{0, start}, {20, stop}, {28, start}, {48, stop}}, 90, codes.Unavailable, 58},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &soleReplica{}
				defer s.stop()
				conn := s.dial(t)
				defer conn.Close()
				began := time.Now()
				go func() {
					for _, e := range c.events {
						time.Sleep(time.Until(began.Add(e.second * time.Second))) // of the bubble's clock
						e.do(s)
					}
				}()
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), c.deadline*time.Second)
				defer cancel()
				_, err := registryv1.NewObjectsClient(WithMaxWait(conn, maxWait)).Get(ctx, &registryv1.GetRequest{})
				ended := time.Since(began)
				named := c.code != codes.Unavailable ||
					strings.HasSuffix(err.Error(), ".Objects/Get: no replica was ready within 10s")
				if status.Code(err) != c.code || !named || c.ends != 0 && ended != c.ends*time.Second {
					t.Errorf("after %v: %v", ended, err)
				}
			})
		})
	}
}

// WithMaxWait keeps the affinity of a call. Other calls have no bound.
func TestABoundedCallKeepsItsAffinity(t *testing.T) {
	ctx := WithAffinity(t.Context(), "pods/x/a")
	if d := MaxWaitOf(ctx); d != 0 {
		t.Errorf("a call without a bound has %v", d)
	}
	var called context.Context
	_ = WithMaxWait(invokerFunc(func(ctx context.Context) { called = ctx }), time.Second).Invoke(ctx, "m", nil, nil)
	if AffinityOf(called) != AffinityOf(ctx) || MaxWaitOf(called) != time.Second {
		t.Errorf("the slot is %q instead of %q, the bound %v", AffinityOf(called), AffinityOf(ctx), MaxWaitOf(called))
	}
}

// invokerFunc is a connection that calls a function with the context of each unary call.
type invokerFunc func(context.Context)

func (f invokerFunc) Invoke(ctx context.Context, _ string, _, _ any, _ ...grpc.CallOption) error {
	f(ctx)
	return nil
}

func (invokerFunc) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream,
	error) {
	return nil, errors.ErrUnsupported
}
