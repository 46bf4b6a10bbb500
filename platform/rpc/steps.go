package rpc

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"watershed.dev/platform/telemetry"
)

// auditIDKey is the metadata with the audit ID of the request that a call serves.
const auditIDKey = "audit-id"

// WithAuditID adds the audit ID of a request to its calls.
func WithAuditID(ctx context.Context, id string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, auditIDKey, id)
}

// startServerSteps starts the steps of a call at its server, with the audit ID of its request.
func startServerSteps(ctx context.Context, method string) (context.Context, *telemetry.Steps) {
	if !telemetry.Verbose(telemetry.StepsVerbosity) {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	if ids := md[auditIDKey]; len(ids) > 0 {
		return telemetry.StartSteps(ctx, method, auditIDKey, ids[0])
	}
	return telemetry.StartSteps(ctx, method)
}

// WithSteps returns a connection whose calls are steps of their requests (telemetry.StartSteps).
func WithSteps(c grpc.ClientConnInterface) grpc.ClientConnInterface { return stepsConn{c} }

type stepsConn struct{ grpc.ClientConnInterface }

// Invoke implements grpc.ClientConnInterface.
func (c stepsConn) Invoke(ctx context.Context, name string, args, reply any, opts ...grpc.CallOption) error {
	if telemetry.Verbose(telemetry.StepsVerbosity) {
		defer telemetry.AddSlowStep(ctx, name, time.Now())
	}
	return c.ClientConnInterface.Invoke(ctx, name, args, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface.
func (c stepsConn) NewStream(ctx context.Context, d *grpc.StreamDesc, name string,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.ClientConnInterface.NewStream(ctx, d, name, opts...)
	if err != nil || !telemetry.Verbose(telemetry.StepsVerbosity) {
		return s, err
	}
	return &stepsStream{s, ctx, name}, nil
}

// stepsStream is a stream whose messages are steps of the request of ctx.
type stepsStream struct {
	grpc.ClientStream
	ctx  context.Context
	name string
}

// RecvMsg implements grpc.ClientStream.
func (s *stepsStream) RecvMsg(m any) error {
	defer telemetry.AddSlowStep(s.ctx, s.name, time.Now())
	return s.ClientStream.RecvMsg(m)
}
