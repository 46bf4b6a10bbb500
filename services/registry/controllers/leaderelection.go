package controllers

import (
	"context"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/controller/leaderelection"
)

// addElectionFlags registers the flags of coordinated leader election (KEP 4355).
func addElectionFlags(fs *pflag.FlagSet, t *leaderelection.LeaderElectionTimers) {
	fs.DurationVar(&t.LeaseDuration, "coordinated-leadership-lease-duration", 15*time.Second,
		"The duration of the lease used for Coordinated Leader Election.")
	fs.DurationVar(&t.RenewDeadline, "coordinated-leadership-renew-deadline", 10*time.Second,
		"The deadline for renewing a coordinated leader election lease.")
	fs.DurationVar(&t.RetryPeriod, "coordinated-leadership-retry-period", 2*time.Second,
		"The period for retrying to renew a coordinated leader election lease.")
}

// hasCoordinatedElection reports whether a controller elects leaders among LeaseCandidates.
func hasCoordinatedElection() bool {
	return utilfeature.DefaultFeatureGate.Enabled(features.CoordinatedLeaderElection)
}

// electCandidates starts the controller that elects leaders among LeaseCandidates, and returns once its informers have
// synced. That needs --runtime-config=coordination.k8s.io/v1beta1=true, as in kube-apiserver. The controller runs while
// this registry also holds kube-apiserver's Lease for it, because kube-apiserver may serve the same etcd.
func (cs *Controllers) electCandidates(ctx context.Context) {
	// cs.Informers would delay every other controller until the group version is served.
	factory := informers.NewSharedInformerFactory(cs.Client, 10*time.Minute)
	leases, candidates := factory.Coordination().V1().Leases(), factory.Coordination().V1beta1().LeaseCandidates()
	_, _ = leases.Informer(), candidates.Informer() // registers them at the factory
	factory.Start(ctx.Done())
	go leaderelection.RunWithLeaderElection(ctx, cs.Loopback, func() (func(context.Context, int), error) {
		controller, err := leaderelection.NewController(leases, candidates, cs.Client.CoordinationV1(),
			cs.Client.CoordinationV1beta1())
		collector := leaderelection.NewLeaseCandidateGC(cs.Client, controlplaneapiserver.LeaseCandidateGCPeriod,
			candidates)
		return func(ctx context.Context, workers int) {
			go controller.Run(ctx, workers)
			go collector.Run(ctx)
		}, err
	}, cs.Election)
	factory.WaitForCacheSync(ctx.Done())
}
