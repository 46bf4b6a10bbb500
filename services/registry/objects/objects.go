// Package objects answers the gateway: the verbs, each over the endpoint of its resource.
package objects

import (
	"context"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/resources"
)

// Objects answers the gateway.
type Objects struct {
	registryv1.UnimplementedObjectsServer
	resources *resources.Resources
}

// New returns the objects of what is served.
func New(r *resources.Resources) *Objects { return &Objects{resources: r} }

// Get answers one object.
func (o *Objects) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	e, err := o.resources.Endpoint(ctx, r.Resource)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp, err := e.Get(resources.Within(ctx, "get", r.Resource, r.User, r.Namespace, r.Name), r)
	return resp, rpc.ToStatus(err)
}

// List answers a list from etcd.
func (o *Objects) List(r *registryv1.GetRequest, stream grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	e, err := o.resources.Endpoint(stream.Context(), r.Resource)
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

// Write runs one write, asking back in its own stream.
func (o *Objects) Write(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	r := first.GetRequest()
	if r == nil {
		return rpc.ToStatus(apierrors.NewBadRequest("a write begins with its request"))
	}
	e, err := o.resources.Endpoint(stream.Context(), r.Resource)
	if err != nil {
		return rpc.ToStatus(err)
	}
	resp, err := e.Write(resources.Within(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name),
		r, &streamGate{stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: resp}})
}

// Connect decides where a request that carries bytes goes, asking back in its own stream.
func (o *Objects) Connect(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	r := first.GetRequest()
	if r == nil {
		return rpc.ToStatus(apierrors.NewBadRequest("a connection begins with its request"))
	}
	e, err := o.resources.Endpoint(stream.Context(), r.Resource)
	if err != nil {
		return rpc.ToStatus(err)
	}
	c, err := e.Connect(resources.Within(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name),
		r, &streamGate{stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Connection{Connection: c}})
}
