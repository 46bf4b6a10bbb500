// Package objects implements the Objects contract for the gateway: it runs each verb on the RequestScope of its
// resource. It does not authorize requests, the gateway does. Each call runs in the goroutine of its RPC.
package objects

import (
	"context"
	"errors"
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
	"watershed.dev/services/registry/storage"
)

// Objects serves the verbs.
type Objects struct {
	registryv1.UnimplementedObjectsServer
	resources *lookup.Resources
	// Namespaces runs NamespaceLifecycle in the registry. Nil: admission runs it for every write.
	Namespaces *Namespaces
}

// New returns the server of the resources.
func New(r *lookup.Resources) *Objects { return &Objects{resources: r} }

// requestScope returns the scope of a request.
func (o *Objects) requestScope(
	ctx context.Context,
	r *commonv1.Resource,
	namespace string,
) (*handlers.RequestScope, error) {
	scope, _, err := o.writeScope(ctx, r, namespace)
	return scope, err
}

// writeScope returns the scope of a request, and the definition of a custom resource. It is not found if the request
// has a namespace and the resource is cluster scoped, because the gateway authorized the request for a namespace. This
// happens if a CRD was deleted and created again with another scope.
func (o *Objects) writeScope(
	ctx context.Context,
	r *commonv1.Resource,
	namespace string,
) (*handlers.RequestScope, *storage.Definition, error) {
	scope, definition, err := o.resources.WriteScope(ctx, r)
	if err == nil && namespace != "" && !scope.APIResource.GetNamespaced() {
		return nil, nil, lookup.NotServed(r)
	}
	return scope, definition, err
}

// Get returns an object.
func (o *Objects) Get(ctx context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	scope, err := o.requestScope(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp, err := scope.Get(lookup.WithRequestInfo(ctx, "get", r.Resource, r.User, r.Namespace, r.Name), r)
	return resp, rpc.ToStatus(err)
}

// List sends a list from etcd.
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
	return frame.Split(body, func(b []byte) error {
		return stream.Send(&registryv1.ListChunk{Data: b})
	})
}

// receiveRequest reads a stream's request.
func receiveRequest(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) (
	*registryv1.WriteRequest, error) {
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if r := first.GetRequest(); r != nil {
		return r, nil
	}
	return nil, apierrors.NewBadRequest("the first message of the stream must be the request")
}

// maxDefinitions is how many states of a CRD a write tries.
const maxDefinitions = 4

// write runs a write. If the CRD of a custom resource has changed before the object is stored, nothing is stored, and
// the write runs again under the new definition. kube-apiserver stores an object under the definition that its informer
// has received.
func (o *Objects) write(ctx context.Context, r *registryv1.WriteRequest,
	callbacks handlers.Callbacks) (*registryv1.ObjectResponse, error) {
	for attempt := 1; ; attempt++ {
		resp, err := o.writeOnce(ctx, r, callbacks)
		if !errors.Is(err, storage.ErrDefinitionChanged) {
			return resp, err
		}
		if refusal := o.readDefinition(ctx, r, attempt); refusal != nil {
			return nil, rpc.WithAuditContext(refusal, rpc.AuditContextOf(err))
		}
	}
}

// readDefinition reads the CRD of a write from etcd. It returns the error of a write that may not run again.
func (o *Objects) readDefinition(ctx context.Context, r *registryv1.WriteRequest, attempt int) error {
	if attempt == maxDefinitions {
		return apierrors.NewTooManyRequests(storage.ErrDefinitionChanged.Error(), 1)
	}
	served, err := o.resources.Custom.Refresh(ctx, r.Resource)
	switch {
	case err != nil:
		return rpc.ToAPIStatus(err)
	case !served:
		return lookup.NotServed(r.Resource)
	}
	return nil
}

// writeOnce runs a write under the definition that registry has. It returns storage.ErrDefinitionChanged if etcd has
// another. A deletecollection needs no definition, because it stores no object of the client.
func (o *Objects) writeOnce(ctx context.Context, r *registryv1.WriteRequest,
	callbacks handlers.Callbacks) (*registryv1.ObjectResponse, error) {
	scope, d, err := o.writeScope(ctx, r.Resource, r.Namespace)
	if err != nil {
		return nil, err
	}
	ctx = lookup.WithRequestInfo(ctx, r.Verb, r.Resource, r.User, r.Namespace, r.Name)
	if d == nil || r.Verb == "deletecollection" {
		return scope.Write(ctx, r, callbacks)
	}
	resp, err := scope.Write(storage.WithDefinition(ctx, d), r, callbacks)
	if err == nil && r.Verb != "delete" || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		changed := d.Confirm(ctx, o.resources.Storage.Client.Client)
		if changed != nil && !errors.Is(changed, storage.ErrDefinitionChanged) {
			changed = rpc.ToAPIStatus(changed)
		}
		if changed != nil {
			return nil, rpc.WithAuditContext(changed, rpc.AuditContextOf(err))
		}
	}
	return resp, err
}

// Write runs a write. Callbacks go to the gateway in the same stream.
func (o *Objects) Write(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, err := receiveRequest(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	resp, err := o.write(stream.Context(), r, &streamCallbacks{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		if auditCtx := rpc.AuditContextOf(err); auditCtx != nil { // it exceeds the size of an error
			if serr := stream.Send(&registryv1.WriteReply{Audit: auditCtx}); serr != nil {
				return serr
			}
		}
		return withoutAuditContext(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: resp}})
}

// withoutAuditContext returns a write's error as a status without the audit context, which is sent separately.
func withoutAuditContext(err error) error {
	return rpc.ToStatus(rpc.WithWarnings(rpc.WithoutDetails(err), rpc.Warnings(err)))
}

// reviewGroups are the groups of reviews, which are never stored. A review reports a failed callback in its status, so
// an error does not show that it needs one.
var reviewGroups = []string{"authentication.k8s.io", "authorization.k8s.io"}

// WriteUnary runs a write without callbacks. If the write needs a callback, nothing is stored and the reply has
// CallbackRequired.
func (o *Objects) WriteUnary(ctx context.Context, r *registryv1.WriteRequest) (*registryv1.WriteUnaryReply, error) {
	if r.Verb == "deletecollection" || slices.Contains(reviewGroups, r.Resource.GetGroup()) {
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	}
	callbacks := &noCallbacks{Namespaces: o.Namespaces}
	resp, err := o.write(ctx, r, callbacks)
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

// Connect returns the address that an exec, attach, port-forward or proxy request connects to. Callbacks go to the
// gateway in the same stream.
func (o *Objects) Connect(stream grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	r, err := receiveRequest(stream)
	if err != nil {
		return rpc.ToStatus(err)
	}
	scope, err := o.requestScope(stream.Context(), r.Resource, r.Namespace)
	if err != nil {
		return rpc.ToStatus(err)
	}
	ctx := lookup.WithRequestInfo(stream.Context(), r.Verb, r.Resource, r.User, r.Namespace, r.Name)
	c, err := scope.Connect(ctx, r, &streamCallbacks{Namespaces: o.Namespaces, stream: stream})
	if err != nil {
		return rpc.ToStatus(err)
	}
	return stream.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Connection{Connection: c}})
}
