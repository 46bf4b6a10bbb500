package rpc

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"watershed.dev/platform/recovery"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

type fake struct {
	registryv1.UnimplementedObjectsServer
	get   func(context.Context, *registryv1.GetRequest) (*registryv1.ObjectResponse, error)
	write func(grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error
}

func (f *fake) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	return f.get(ctx, r)
}

func (f *fake) Write(s grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	return f.write(s)
}

func clientOf(f *fake) registryv1.ObjectsClient {
	p := NewInProcess(false)
	registryv1.RegisterObjectsServer(p, f)
	return registryv1.NewObjectsClient(p.Client("gateway"))
}

func TestInProcessCallsShareMessages(t *testing.T) {
	body := []byte("large")
	c := clientOf(&fake{get: func(_ context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return &registryv1.ObjectResponse{Body: body, Code: int32(len(r.Name))}, nil
	}})
	resp, err := c.Get(t.Context(), &registryv1.GetRequest{Name: "abc"})
	if err != nil || resp.Code != 3 || &resp.Body[0] != &body[0] {
		t.Errorf("got %v, %v; the body must be the same memory", resp, err)
	}
}

// A call carries the values of a wire to the handler. The caller's own context values do not cross: an audit context,
// warnings, a user.
func TestInProcessCallsCarryNoValues(t *testing.T) {
	type key struct{}
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "v"), time.Minute)
	defer cancel()
	c := clientOf(&fake{get: func(ctx context.Context, _ *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		_, bounded := ctx.Deadline()
		if ctx.Value(key{}) != nil || len(md["a"]) != 1 || !bounded || ctx.Value(clientKey{}) != "gateway" {
			t.Errorf("%v, %v, %v, %v", ctx.Value(key{}), md, bounded, ctx.Value(clientKey{}))
		}
		if md, _ := metadata.FromOutgoingContext(ctx); md != nil {
			t.Errorf("the handler would forward it: %v", md)
		}
		const contexts = 100
		before := runtime.NumGoroutine()
		var last context.Context
		for range contexts {
			own, end := context.WithCancel(ctx)
			defer end()
			last = own
		}
		// Goroutines of other tests start and end meanwhile.
		if more := runtime.NumGoroutine() - before; more > contexts/2 {
			t.Errorf("%d contexts that are made of it have %d goroutines", contexts, more)
		}
		cancel()
		<-last.Done()
		return &registryv1.ObjectResponse{}, nil
	}})
	if _, err := c.Get(metadata.AppendToOutgoingContext(ctx, "a", "b"), &registryv1.GetRequest{}); err != nil {
		t.Error(err)
	}
}

func TestAnAPIErrorCrossesWhole(t *testing.T) {
	want := apierrors.NewInvalid(schema.GroupKind{Group: "apps", Kind: "Deployment"}, "web",
		field.ErrorList{field.Required(field.NewPath("spec"), "say it")})
	c := clientOf(&fake{get: func(context.Context, *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return nil, want
	}})
	_, err := c.Get(t.Context(), &registryv1.GetRequest{})
	var got *apierrors.StatusError
	if !errors.As(FromStatus(err), &got) || got.ErrStatus.Code != 422 || len(got.ErrStatus.Details.Causes) != 1 ||
		got.Error() != want.Error() {
		t.Errorf("%v came out as %v", want, FromStatus(err))
	}
}

func TestALostPeerIsAServiceToRetry(t *testing.T) {
	err := FromStatus(status.Error(codes.Unavailable, "gone"))
	if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsServiceUnavailable(err) || !ok || seconds < 1 {
		t.Errorf("%v must be a 503 with Retry-After", err)
	}
}

func TestAPanicIsAnError(t *testing.T) {
	c := clientOf(&fake{get: func(context.Context, *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		panic("boom")
	}})
	before := testutil.ToFloat64(recovery.Metrics()[0])
	if _, err := c.Get(t.Context(), &registryv1.GetRequest{}); status.Code(err) != codes.Internal {
		t.Errorf("got %v", err)
	}
	if n := testutil.ToFloat64(recovery.Metrics()[0]) - before; n != 1 {
		t.Errorf("%v panics are counted", n)
	}
}

func TestInProcessStreamsAskAndAnswer(t *testing.T) {
	c := clientOf(&fake{write: func(s grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
		for {
			m, err := s.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			result := &registryv1.WriteReply_Result{Result: &registryv1.ObjectResponse{Body: m.GetRequest().Body}}
			if err := s.Send(&registryv1.WriteReply{Reply: result}); err != nil {
				return err
			}
		}
	}})
	s, err := c.Write(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"a", "b"} {
		request := &registryv1.WriteCall_Request{Request: &registryv1.WriteRequest{Body: []byte(text)}}
		if err := s.Send(&registryv1.WriteCall{Call: request}); err != nil {
			t.Fatal(err)
		}
		m, err := s.Recv()
		if err != nil || string(m.GetResult().Body) != text {
			t.Errorf("sent %q, got %v, %v", text, m, err)
		}
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
}

// Messages that were sent before a stream failed arrive before its error.
func TestInProcessErrorsComeLast(t *testing.T) {
	c := clientOf(&fake{write: func(s grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
		for range streamBuffer {
			if err := s.Send(&registryv1.WriteReply{}); err != nil {
				return err
			}
		}
		return apierrors.NewConflict(schema.GroupResource{Resource: "x"}, "y", errors.New("z"))
	}})
	s, err := c.Write(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range streamBuffer {
		if _, err := s.Recv(); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	if _, err := s.Recv(); !apierrors.IsConflict(FromStatus(err)) {
		t.Errorf("got %v", err)
	}
}

func TestACancelledStreamEndsItsHandler(t *testing.T) {
	ended := make(chan struct{})
	c := clientOf(&fake{write: func(s grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
		defer close(ended)
		_, err := s.Recv()
		return err
	}})
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := c.Write(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(2 * time.Minute):
		t.Error("the handler runs on")
	}
}

// A stream ends at the client's deadline, even if the handler ignores it.
func TestAStreamEndsAtItsDeadline(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	c := clientOf(&fake{write: func(grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
		<-release
		return nil
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	s, err := c.Write(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
}

// lists sends chunks of a list until its stream ends.
type lists struct {
	watchfanoutv1.UnimplementedWatchServer
	chunk []byte
	sent  atomic.Int64
}

func (l *lists) List(_ *watchfanoutv1.ListRequest, s grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	for {
		if err := s.Send(&watchfanoutv1.ListChunk{Data: [][]byte{l.chunk}}); err != nil {
			return err
		}
		l.sent.Add(1)
	}
}

// A sender of a list is ahead of its receiver by a number of bytes, or by a single chunk if it has more.
func TestAListIsAheadByItsBytes(t *testing.T) {
	for _, c := range []struct{ bytes, ahead int }{{1 << 10, streamBuffer}, {1 << 20, 4}, {7 << 20, 1}} {
		synctest.Test(t, func(t *testing.T) {
			p, l := NewInProcess(false), &lists{chunk: make([]byte, c.bytes)}
			watchfanoutv1.RegisterWatchServer(p, l)
			ctx, cancel := context.WithCancel(t.Context())
			s, err := watchfanoutv1.NewWatchClient(p.Client("gateway")).List(ctx, &watchfanoutv1.ListRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for received := range 10 {
				synctest.Wait()
				if n := int(l.sent.Load()) - received; n != c.ahead {
					t.Errorf("after %d chunks of %d bytes, the sender is %d ahead", received, c.bytes, n)
				}
				if _, err := s.Recv(); err != nil {
					t.Fatal(err)
				}
			}
			cancel()
			synctest.Wait()
		})
	}
}
