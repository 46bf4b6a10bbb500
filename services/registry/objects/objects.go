// Package objects answers the gateway: the verbs, each over the endpoint of its resource.
package objects

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/lookup"
)

// Objects answers the gateway.
type Objects struct {
	registryv1.UnimplementedObjectsServer
	resources *lookup.Resources
	// Namespaces is what registry knows of them itself; nil: admission is asked about each creation.
	Namespaces *Namespaces
}

// New returns the objects of what is served.
func New(r *lookup.Resources) *Objects { return &Objects{resources: r} }

// requestScope finds what a request is for. One in a namespace is for nothing that has none: a CRD may have been defined
// anew, and the permission that the gateway asked for is for a namespace.
func (o *Objects) requestScope(
	ctx context.Context,
	r *commonv1.Resource,
	namespace string,
) (*handlers.RequestScope, error) {
	scope, err := o.resources.RequestScope(ctx, r)
	if err == nil && namespace != "" && !scope.APIResource.GetNamespaced() {
		return nil, lookup.NotServed(r)
	}
	return scope, err
}

// Get answers one object.
func (o *Objects) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	scope, err := o.requestScope(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp, err := scope.Get(lookup.WithRequestInfo(ctx, "get", r.Resource, r.User, r.Namespace, r.Name), r)
	return resp, rpc.ToStatus(err)
}

// List answers a list from etcd.
func (o *Objects) List(r *registryv1.GetRequest, stream grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	scope, err := o.requestScope(stream.Context(), r.Resource, r.Namespace)
	if err != nil {
		return rpc.ToStatus(err)
	}
	body, err := scope.List(
		lookup.WithRequestInfo(stream.Context(), "list", r.Resource, r.User, r.Namespace, r.Name),
		r,
	)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return frame.Split(body, frame.ChunkBytes, func(b []byte) error {
		return stream.Send(&registryv1.ListChunk{Data: b})
	})
}

// receiveRequest reads a stream's request, and finds what it is for.
func (o *Objects) receiveRequest(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) (
	*registryv1.WriteRequest, *handlers.RequestScope, context.Context, error) {
	first, err := stream.Recv()
	if err != nil {
		return nil, nil, nil, err
	}
	r := first.GetRequest()
	if r == nil {
		return nil, nil, nil, apierrors.NewBadRequest("the stream begins with its request")
	}
	scope, err := o.requestScope(stream.Context(), r.Resource, r.Namespace)
	if err != nil {
		return nil, nil, nil, err
	}
	return r, scope, lookup.WithRequestInfo(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name), nil
}

// Write runs one write, asking back in its own stream.
func (o *Objects) Write(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, scope, ctx, err := o.receiveRequest(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	resp, err := scope.Write(ctx, r, &streamCallbacks{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		if auditCtx := rpc.AuditContextOf(err); auditCtx != nil { // it is too large for what an error has room for
			if serr := stream.Send(&registryv1.WriteReply{Audit: auditCtx}); serr != nil {
				return serr
			}
		}
		return withoutAuditContext(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: resp}})
}

// withoutAuditContext is a write's error as a status, without what is told of it beside it.
func withoutAuditContext(err error) error {
	return rpc.ToStatus(rpc.WithWarnings(rpc.WithoutDetails(err), rpc.Warnings(err)))
}

// reviewGroups are the groups of what is never stored, and tells in its answer what was asked, also where that failed: an
// error is no sign of a question there.
var reviewGroups = []string{"authentication.k8s.io", "authorization.k8s.io"}

// WriteUnary runs one write about which nothing is to be asked.
func (o *Objects) WriteUnary(ctx context.Context, r *registryv1.WriteRequest) (*registryv1.WriteUnaryReply, error) {
	if r.Verb == "deletecollection" || slices.Contains(reviewGroups, r.Resource.GetGroup()) {
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	}
	scope, err := o.requestScope(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	callbacks := &noCallbacks{Namespaces: o.Namespaces}
	resp, err := scope.Write(lookup.WithRequestInfo(ctx, r.Verb, r.Resource, r.User, r.Namespace, r.Name), r, callbacks)
	switch {
	case err == nil:
		return &registryv1.WriteUnaryReply{Result: resp}, nil
	case callbacks.callbackRequired.Load():
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	}
	statusProto, merr := proto.Marshal(status.Convert(withoutAuditContext(err)).Proto())
	if merr != nil {
		return nil, merr
	}
	return &registryv1.WriteUnaryReply{Error: statusProto, Audit: rpc.AuditContextOf(err)}, nil
}

// Connect decides where a request that carries bytes goes, asking back in its own stream.
func (o *Objects) Connect(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, scope, ctx, err := o.receiveRequest(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	c, err := scope.Connect(ctx, r, &streamCallbacks{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Connection{Connection: c}})
}
