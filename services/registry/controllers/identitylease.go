package controllers

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"log/slog"
	"os"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/kubernetes"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/component-helpers/apimachinery/lease"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/controller/apiserverleasegc"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
)

// HasIdentityLease reports whether API servers have identity leases.
func HasIdentityLease() bool {
	return utilfeature.DefaultFeatureGate.Enabled(features.APIServerIdentity)
}

// leaseName returns the name of the identity lease that kube-apiserver has on a host (genericapiserver.NewConfig).
func leaseName(host string) string {
	var data []byte
	for _, s := range []string{host, identityName} {
		data = append(binary.BigEndian.AppendUint16(data, uint16(len(s))), s...)
	}
	hash := sha256.Sum256(data)
	return "apiserver-" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(hash[:16]))
}

// releaseTimeout bounds the deletion of the identity lease at the end of a registry.
const releaseTimeout = 3 * time.Second

// RenewIdentityLease renews the identity lease of this API server until ctx ends. Then it deletes the lease, as
// kube-apiserver does. Every registry calls it. Registries and kube-apiservers of the same host share its lease.
func (cs *Controllers) RenewIdentityLease(ctx context.Context) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	return renewIdentityLease(ctx, cs.Client, host, cs.Identity)
}

func renewIdentityLease(ctx context.Context, client kubernetes.Interface, host, identity string) error {
	name := leaseName(host)
	holder := name + "_" + identity
	lease.NewController(clock.RealClock{}, sharedLeases{client}, holder,
		int32(controlplaneapiserver.IdentityLeaseDurationSeconds), nil,
		controlplaneapiserver.IdentityLeaseRenewIntervalPeriod, name, metav1.NamespaceSystem,
		func(o *coordinationv1.Lease) error {
			o.Spec.HolderIdentity = &holder // the controller keeps the holder of a lease that exists
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			o.Labels[controlplaneapiserver.IdentityLeaseComponentLabelKey] = identityName
			o.Labels[corev1.LabelHostname] = host
			delete(o.Annotations, corev1.AnnotationPeerAdvertiseAddress) // the gateways are no peers
			return nil
		}).Run(ctx)
	if err := releaseIdentityLease(ctx, client, name, holder); err != nil && !apierrors.IsNotFound(err) &&
		!apierrors.IsConflict(err) {
		slog.Warn("Cannot delete the identity lease", "lease", name, "error", err)
	}
	return ctx.Err()
}

// releaseIdentityLease deletes an identity lease, also after the end of ctx. It keeps the lease if another
// registry of the host has renewed it last.
func releaseIdentityLease(ctx context.Context, client kubernetes.Interface, name, holder string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	leases := client.CoordinationV1().Leases(metav1.NamespaceSystem)
	o, err := leases.Get(ctx, name, metav1.GetOptions{})
	if err != nil || ptr.Deref(o.Spec.HolderIdentity, "") != holder {
		return err
	}
	return leases.Delete(ctx, name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &o.UID, ResourceVersion: &o.ResourceVersion},
	})
}

// collectIdentityLeases deletes the identity leases of servers that have stopped.
func (cs *Controllers) collectIdentityLeases(ctx context.Context) {
	apiserverleasegc.NewAPIServerLeaseGC(cs.Client, controlplaneapiserver.IdentityLeaseGCPeriod,
		metav1.NamespaceSystem,
		controlplaneapiserver.IdentityLeaseComponentLabelKey+"="+identityName).RunWithContext(ctx)
}

// sharedLeases is a client whose leases several registries renew. The controller of a lease expects no other and
// would log each of its renewals as an error.
type sharedLeases struct{ kubernetes.Interface }

// CoordinationV1 implements kubernetes.Interface.
func (c sharedLeases) CoordinationV1() coordinationclient.CoordinationV1Interface {
	return sharedCoordination{c.Interface.CoordinationV1()}
}

type sharedCoordination struct {
	coordinationclient.CoordinationV1Interface
}

// Leases implements coordinationclient.CoordinationV1Interface.
func (c sharedCoordination) Leases(namespace string) coordinationclient.LeaseInterface {
	return sharedLease{c.CoordinationV1Interface.Leases(namespace)}
}

type sharedLease struct {
	coordinationclient.LeaseInterface
}

// Update implements coordinationclient.LeaseInterface. If another registry has just renewed the lease, Update returns
// that lease.
func (l sharedLease) Update(ctx context.Context, o *coordinationv1.Lease,
	opts metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	updated, err := l.LeaseInterface.Update(ctx, o, opts)
	if !apierrors.IsConflict(err) {
		return updated, err
	}
	current, getErr := l.Get(ctx, o.Name, metav1.GetOptions{})
	if getErr != nil || current.Spec.RenewTime == nil ||
		time.Since(current.Spec.RenewTime.Time) > controlplaneapiserver.IdentityLeaseRenewIntervalPeriod {
		return nil, err
	}
	return current, nil
}
