package rpc

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrDelegate is the answer of a service that holds a part of what is stored to what only registry's Objects can
// say: what it does not hold, a form that it does not write, or in which words something is refused.
var ErrDelegate = status.Error(codes.FailedPrecondition, "not held here; ask registry")

// ErrDraining ends a stream that another replica goes on with.
var ErrDraining = status.Error(codes.Unavailable, "the replica is draining")
