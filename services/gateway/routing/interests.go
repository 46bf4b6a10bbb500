package routing

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/interest"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// Interests follows what the admission chain looks at. Until admission has said so, it looks at everything.
type Interests struct {
	Client  admissionv1.AdmissionClient
	current atomic.Pointer[admissionv1.InterestSet]
}

// interestsPause is how long to wait before admission is asked again what it looks at.
const interestsPause = 100 * time.Millisecond

// Run follows until ctx is done. When the stream breaks, what admission may since have become interested in is not
// known: everything goes there again.
func (i *Interests) Run(ctx context.Context) {
	open := func(ctx context.Context) (grpc.ServerStreamingClient[admissionv1.InterestSet], error) {
		return i.Client.Interests(ctx, &admissionv1.InterestsRequest{})
	}
	rpc.Follow(ctx, interestsPause, open,
		func(m *admissionv1.InterestSet, _ bool) { i.current.Store(m) },
		func(error) { i.current.Store(nil) })
}

var allOperations = []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE,
	admissionv1.Operation_OPERATION_UPDATE,
	admissionv1.Operation_OPERATION_DELETE, admissionv1.Operation_OPERATION_CONNECT}

// For is the operations that each phase looks at of a user's request on an object of r; lifecycle are those of admit
// that registry answers itself.
func (i *Interests) For(r *commonv1.Resource, namespace, name string,
	u *commonv1.User) (admit, lifecycle, validate []admissionv1.Operation) {
	set := i.current.Load()
	if set == nil {
		return allOperations, nil, allOperations
	}
	admit, lifecycle = interest.Operations(set.Admit, r, namespace, name, u)
	validate, _ = interest.Operations(set.Validate, r, namespace, name, u)
	return append(admit, lifecycle...), lifecycle, validate
}
