package authn

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

// tokenObjects reads the objects that tokens are bound to, and records failed reads. Upstream rejects a token if its
// object cannot be read (k8s.io/kubernetes/pkg/serviceaccount, Validate). kube-apiserver has the pods and nodes in
// memory; authn reads them through a gateway, and must not reject valid tokens while etcd is unavailable.
//
// The record is of the process, not of a request, because upstream's cache of tokens shares a lookup among requests and
// detaches it from their contexts (k8s.io/apiserver/pkg/authentication/token/cache).
type tokenObjects struct {
	serviceaccount.ServiceAccountTokenGetter
	failedAt atomic.Pointer[time.Time]
}

// lookupTime is how long before a request the lookup that it shares may have failed to read an object. Upstream's
// shared lookup takes that long at most, for example because of a webhook.
const lookupTime = 30 * time.Second

// failedSince reports whether a read has failed during a lookup that a request which began at t may share.
func (o *tokenObjects) failedSince(t time.Time) bool {
	failedAt := o.failedAt.Load()
	return failedAt != nil && failedAt.After(t.Add(-lookupTime))
}

// record records err if a later read may succeed. Other errors are about the object or the token: the object does not
// exist, or the token has no name for it. Without the token cache (--authentication-cache-ttl=0), a client that leaves
// cancels its read. Such a read is not recorded, because other tokens can still be decided.
func (o *tokenObjects) record(ctx context.Context, err error) {
	if errors.Is(ctx.Err(), context.Canceled) && errors.Is(err, context.Canceled) {
		return
	}
	var api apierrors.APIStatus
	var network *url.Error
	undecided := errors.As(err, &network) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	if errors.As(err, &api) {
		code := api.Status().Code
		undecided = code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
	}
	if undecided {
		now := time.Now()
		o.failedAt.Store(&now)
	}
}

// GetServiceAccount implements serviceaccount.ServiceAccountTokenGetter.
func (o *tokenObjects) GetServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error) {
	account, err := o.ServiceAccountTokenGetter.GetServiceAccount(ctx, namespace, name)
	o.record(ctx, err)
	return account, err
}

// GetPod implements serviceaccount.ServiceAccountTokenGetter.
func (o *tokenObjects) GetPod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	pod, err := o.ServiceAccountTokenGetter.GetPod(ctx, namespace, name)
	o.record(ctx, err)
	return pod, err
}

// GetSecret implements serviceaccount.ServiceAccountTokenGetter.
func (o *tokenObjects) GetSecret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	secret, err := o.ServiceAccountTokenGetter.GetSecret(ctx, namespace, name)
	o.record(ctx, err)
	return secret, err
}

// GetNode implements serviceaccount.ServiceAccountTokenGetter.
func (o *tokenObjects) GetNode(ctx context.Context, name string) (*corev1.Node, error) {
	node, err := o.ServiceAccountTokenGetter.GetNode(ctx, name)
	o.record(ctx, err)
	return node, err
}
