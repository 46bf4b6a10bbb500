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
	"watershed.dev/services/registry/resources"
	"watershed.dev/services/registry/verbs"
)

// Objects answers the gateway.
type Objects struct {
	registryv1.UnimplementedObjectsServer
	resources *resources.Resources
	// Namespaces is what registry knows of them itself; nil: admission is asked about each creation.
	Namespaces *Namespaces
}

// New returns the objects of what is served.
func New(r *resources.Resources) *Objects { return &Objects{resources: r} }

// endpoint finds what a request is for. One in a namespace is for nothing that has none: a CRD may have been defined
// anew, and the permission that the gateway asked for is for a namespace.
func (o *Objects) endpoint(ctx context.Context, r *commonv1.Resource, namespace string) (*verbs.Endpoint, error) {
	e, err := o.resources.Endpoint(ctx, r)
	if err == nil && namespace != "" && !e.Entry.GetNamespaced() {
		return nil, resources.NotServed(r)
	}
	return e, err
}

// Get answers one object.
func (o *Objects) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	e, err := o.endpoint(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp, err := e.Get(resources.Within(ctx, "get", r.Resource, r.User, r.Namespace, r.Name), r)
	return resp, rpc.ToStatus(err)
}

// List answers a list from etcd.
func (o *Objects) List(r *registryv1.GetRequest, stream grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	e, err := o.endpoint(stream.Context(), r.Resource, r.Namespace)
	if err != nil {
		return rpc.ToStatus(err)
	}
	body, err := e.List(resources.Within(stream.Context(), "list", r.Resource, r.User, r.Namespace, r.Name), r)
	if err != nil {
		return rpc.ToStatus(err)
	}
	return frame.Split(body, frame.ChunkBytes, func(b []byte) error {
		return stream.Send(&registryv1.ListChunk{Data: b})
	})
}

// begin reads a stream's request, and finds what it is for.
func (o *Objects) begin(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) (
	*registryv1.WriteRequest, *verbs.Endpoint, context.Context, error) {
	first, err := stream.Recv()
	if err != nil {
		return nil, nil, nil, err
	}
	r := first.GetRequest()
	if r == nil {
		return nil, nil, nil, apierrors.NewBadRequest("the stream begins with its request")
	}
	e, err := o.endpoint(stream.Context(), r.Resource, r.Namespace)
	if err != nil {
		return nil, nil, nil, err
	}
	return r, e, resources.Within(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name), nil
}

// Write runs one write, asking back in its own stream.
func (o *Objects) Write(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, e, ctx, err := o.begin(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	resp, err := e.Write(ctx, r, &streamGate{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		if trail := rpc.AuditContextOf(err); trail != nil { // it is too large for what an error has room for
			if serr := stream.Send(&registryv1.WriteReply{Audit: trail}); serr != nil {
				return serr
			}
		}
		return withoutTrail(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: resp}})
}

// withoutTrail is a write's error as a status, without what is told of it beside it.
func withoutTrail(err error) error {
	return rpc.ToStatus(rpc.WithWarnings(rpc.WithoutDetails(err), rpc.Warnings(err)))
}

// reviews are the groups of what is never stored, and tells in its answer what was asked, also where that failed: an
// error is no sign of a question there.
var reviews = []string{"authentication.k8s.io", "authorization.k8s.io"}

// WriteUnary runs one write about which nothing is to be asked.
func (o *Objects) WriteUnary(ctx context.Context, r *registryv1.WriteRequest) (*registryv1.WriteUnaryReply, error) {
	if r.Verb == "deletecollection" || slices.Contains(reviews, r.Resource.GetGroup()) {
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	}
	e, err := o.endpoint(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	gate := &directGate{Namespaces: o.Namespaces}
	resp, err := e.Write(resources.Within(ctx, r.Verb, r.Resource, r.User, r.Namespace, r.Name), r, gate)
	switch {
	case err == nil:
		return &registryv1.WriteUnaryReply{Result: resp}, nil
	case gate.asked.Load():
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	}
	of, merr := proto.Marshal(status.Convert(withoutTrail(err)).Proto())
	if merr != nil {
		return nil, merr
	}
	return &registryv1.WriteUnaryReply{Error: of, Audit: rpc.AuditContextOf(err)}, nil
}

// Connect decides where a request that carries bytes goes, asking back in its own stream.
func (o *Objects) Connect(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, e, ctx, err := o.begin(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	c, err := e.Connect(ctx, r, &streamGate{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Connection{Connection: c}})
}
