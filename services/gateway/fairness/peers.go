package fairness

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

const (
	// component is what the gateways' leases are labelled with, as kube-apiserver labels its own
	// (k8s.io/kubernetes/pkg/controlplane/apiserver, IdentityLeaseComponentLabelKey).
	componentLabel = "apiserver.kubernetes.io/identity"
	component      = "watershed-gateway"
	leaseNamespace = metav1.NamespaceSystem
	// renewPeriod is how often a gateway says that it lives, and leaseFor how long it counts without.
	renewPeriod = 10 * time.Second
	leaseFor    = 35 * time.Second
	// forgetAfter is when a lease that nobody renews is deleted.
	forgetAfter = time.Hour
)

// peers counts the gateways that live, by their leases.
type peers struct {
	client kubernetes.Interface
	name   string
	seen   map[string]sighting
}

// sighting is what was last seen of a lease, by this process' clock: gateways' clocks may differ.
type sighting struct {
	version string
	at      time.Time
}

// run keeps this gateway's lease until ctx is done, and tells how many live whenever it has counted them.
func (p *peers) run(ctx context.Context, tell func(n int)) {
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = p.client.CoordinationV1().Leases(leaseNamespace).Delete(ending, p.name, metav1.DeleteOptions{})
	}()
	for {
		n, err := p.count(ctx)
		if err == nil {
			tell(n)
		} else if ctx.Err() == nil {
			slog.Warn("The gateways cannot be counted; the seats of flow control stay as they are", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(renewPeriod):
		}
	}
}

// count renews this gateway's lease and counts those that were renewed lately.
func (p *peers) count(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, renewPeriod)
	defer cancel()
	if err := p.renew(ctx); err != nil {
		return 0, err
	}
	list, err := p.client.CoordinationV1().Leases(leaseNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: componentLabel + "=" + component,
	})
	if err != nil {
		return 0, err
	}
	now, n := time.Now(), 1
	before := p.seen
	p.seen = map[string]sighting{}
	for i := range list.Items {
		lease := &list.Items[i]
		if lease.Name == p.name {
			continue
		}
		s, known := before[lease.Name]
		if !known || s.version != lease.ResourceVersion {
			s = sighting{lease.ResourceVersion, now}
		}
		p.seen[lease.Name] = s
		switch age := now.Sub(s.at); {
		case age > forgetAfter:
			_ = p.client.CoordinationV1().Leases(leaseNamespace).Delete(ctx, lease.Name, metav1.DeleteOptions{})
		case age < leaseFor:
			n++
		}
	}
	return n, nil
}

func (p *peers) renew(ctx context.Context) error {
	leases := p.client.CoordinationV1().Leases(leaseNamespace)
	now := metav1.NowMicro()
	renewed, err := json.Marshal(map[string]any{"spec": map[string]any{"renewTime": now}})
	if err != nil {
		return err
	}
	_, err = leases.Patch(ctx, p.name, types.MergePatchType, renewed, metav1.PatchOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	seconds := int32(leaseFor / time.Second)
	_, err = leases.Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: p.name, Labels: map[string]string{componentLabel: component}},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity:       &p.name,
			LeaseDurationSeconds: &seconds,
			RenewTime:            &now,
		},
	}, metav1.CreateOptions{})
	return err
}
