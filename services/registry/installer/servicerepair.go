package installer

import (
	"time"

	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/registry/core/service/allocator"
	serviceallocator "k8s.io/kubernetes/pkg/registry/core/service/allocator/storage"

	"watershed.dev/services/registry/storage"
)

// RepairInterval is the pause between two repairs of Service addresses and node ports, as in kube-apiserver
// (k8s.io/kubernetes/pkg/controlplane, repairLoopInterval).
const RepairInterval = 3 * time.Minute

// ServiceRepairHook is the name of upstream's start hook of these repairs.
const ServiceRepairHook = "start-service-ip-repair-controllers"

// NodePorts returns etcd's record of the allocated node ports, for a repair loop
// (k8s.io/kubernetes/pkg/registry/core/rest, newServiceIPAllocators). The caller destroys it.
func (o *Options) NodePorts(s *storage.Storage) (*serviceallocator.Etcd, error) {
	config, err := s.Factory.NewConfig(api.Resource("services"), &api.Service{})
	if err != nil {
		return nil, err
	}
	r := o.ServiceNodePortRange
	return serviceallocator.NewEtcd(allocator.NewAllocationMap(r.Size, r.String()), "/ranges/servicenodeports",
		config.ForResource(api.Resource("servicenodeportallocations")))
}
