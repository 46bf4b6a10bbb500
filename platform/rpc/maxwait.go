package rpc

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// WithMaxWait returns a connection whose unary calls wait at most d for a ready replica, and then fail with
// UNAVAILABLE. If gRPC sends a call again because its replica is lost, the call waits at most d again. The response
// time of a replica is not bounded. A call keeps its affinity (WithAffinity). Hedged does not track its replica.
func WithMaxWait(c grpc.ClientConnInterface, d time.Duration) grpc.ClientConnInterface {
	return maxWaitConn{c, d}
}

type maxWaitConn struct {
	grpc.ClientConnInterface
	maxWait time.Duration
}

// Invoke implements grpc.ClientConnInterface.
func (c maxWaitConn) Invoke(ctx context.Context, name string, args, reply any, opts ...grpc.CallOption) error {
	n := &callState{slot: AffinityOf(ctx), maxWait: c.maxWait}
	return c.ClientConnInterface.Invoke(context.WithValue(ctx, callStateKey{}, n), name, args, reply, opts...)
}

// MaxWaitOf returns the bound that WithMaxWait added to the call of ctx, or 0. Tests of callers use it.
func MaxWaitOf(ctx context.Context) time.Duration {
	if n := callStateOf(ctx); n != nil {
		return n.maxWait
	}
	return 0
}

// errNoReplica cancels a call that has waited for maxWait.
var errNoReplica = errors.New("no replica is ready")

// boundWait returns a context that errNoReplica cancels once the call of a method has waited for maxWait. The caller
// passes the call's error to end, which releases the context and returns the error for the client.
func (n *callState) boundWait(ctx context.Context, method string) (waiting context.Context, end func(error) error) {
	ctx, cancel := context.WithCancelCause(ctx)
	n.wait = time.AfterFunc(n.maxWait, func() { cancel(errNoReplica) })
	return ctx, func(err error) error {
		n.wait.Stop()
		if status.Code(err) == codes.Canceled && errors.Is(context.Cause(ctx), errNoReplica) {
			err = status.Errorf(codes.Unavailable, "%s: no replica was ready within %v", method[1:], n.maxWait)
		}
		cancel(nil)
		return err
	}
}

// atReplica stops the timer of a call that has a replica. done starts it again, because gRPC may send the call again.
// gRPC also calls done if the connection was lost before the call was sent.
func (n *callState) atReplica(done func(balancer.DoneInfo)) func(balancer.DoneInfo) {
	n.wait.Stop()
	return func(info balancer.DoneInfo) {
		done(info)
		n.wait.Reset(n.maxWait)
	}
}
