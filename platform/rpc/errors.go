package rpc

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrDelegate is the response of a cache to a request that only the registry's Objects service can serve. The cache
// lacks the object, does not write the requested encoding, or does not have kube-apiserver's error text.
var ErrDelegate = status.Error(codes.FailedPrecondition, "not served from this cache; delegate to the registry")

// ErrDraining ends a stream that another replica can continue.
var ErrDraining = status.Error(codes.Unavailable, "the replica is draining")
