// Package capacity computes the processes that a cluster of a given size needs, from costs that `make bench` measures.
//
// Load is the input and Plan the output. Costs are in measured.json. The model is linear: docs/operators/capacity.md
// names its assumptions.
package capacity

import (
	"cmp"
	"math"
	"slices"
	"time"

	"watershed.dev/platform/rpc"
)

// Load is a cluster and its work.
type Load struct {
	Nodes, PodsPerNode int
	// PodsPerSecond is how many pods are created, and how many are deleted, in a second.
	PodsPerSecond float64
	// SharedWatches are watches that every node has, such as of all Services. OwnWatches are watches of a node alone,
	// such as of a Secret.
	SharedWatches, OwnWatches int
	// SharedEvents is how many events a second the shared watches of each node receive.
	SharedEvents float64
	// Informers is how many clients watch all pods and all nodes.
	Informers int
	// SmallObjects is how many ConfigMaps and other objects of about 1 KB a node adds.
	SmallObjects              int
	LeasePeriod, StatusPeriod time.Duration
	// ListMegabytes is how many megabytes of lists clients read in a second.
	ListMegabytes float64
}

// Limits bound the processes of a plan.
type Limits struct {
	// Cores and Gigabytes are the size of a machine.
	Cores, Gigabytes float64
	// EtcdWrites is how many writes a second an etcd accepts. EtcdGigabytes is its quota.
	EtcdWrites, EtcdGigabytes float64
	// NATSMegabytes is how many megabytes a second a NATS server sends.
	NATSMegabytes float64
}

// A pod has seven writes: its creation, its binding, three updates of its status, and two of its deletion. Its Events
// are of the scheduler and the kubelet.
const (
	writesOfPod = 7
	eventsOfPod = 5
)

// Sizes of objects in kilobytes, as in the measurement: in etcd, and as a message of the event log.
const (
	podKilobytes, podMessage     = 5.8, 4
	smallKilobytes, smallMessage = 1.2, 2.5
)

// busy is the share of its cores that a process may use. The rest is for peaks.
const busy = 0.6

// fewest is the number of processes of a service that is available while a process restarts.
const fewest = 2

// natsConnections is how many watchfanout replicas NATS accepts (cmd/embedded/accounts.conf).
const natsConnections = 64

// Plan is the need of a load.
type Plan struct {
	Nodes   int     `json:"nodes"`
	Pods    int     `json:"pods"`
	Objects int     `json:"objects"`
	Watches int     `json:"watches"`
	Writes  float64 `json:"writesPerSecond"`
	// Deliveries is how many events clients receive in a second.
	Deliveries float64   `json:"deliveriesPerSecond"`
	Services   []Service `json:"services"`
	// Walls are the limits, the nearest first.
	Walls []Wall `json:"walls"`
}

// Service is the need of a service.
type Service struct {
	Name      string  `json:"name"`
	Processes int     `json:"processes"`
	Cores     float64 `json:"cores"`
	// Gigabytes is the memory of a process: of the largest, if they differ.
	Gigabytes float64 `json:"gigabytesEach"`
	// TotalGigabytes is the memory of all processes.
	TotalGigabytes float64 `json:"gigabytesInAll"`
}

// Wall is a limit that does not move with more processes.
type Wall struct {
	Name string `json:"name"`
	// Use is the need as a fraction of the limit. Above 1, the load does not fit.
	Use    float64 `json:"use"`
	Remedy string  `json:"remedy,omitempty"`
}

// rates are operations a second. shared are deliveries to watches that every node has, own are deliveries to other
// watches, and ofPods is the part of own for events of pods.
type rates struct{ leases, pods, small, shared, own, ofPods, lists float64 }

func (l *Load) rates() (r rates) {
	nodes := float64(l.Nodes)
	statuses := nodes / l.StatusPeriod.Seconds()
	r.leases = nodes / l.LeasePeriod.Seconds()
	r.pods = writesOfPod*l.PodsPerSecond + statuses
	r.small = eventsOfPod*l.PodsPerSecond + l.SharedEvents
	r.lists = l.ListMegabytes
	r.ofPods = r.pods * (float64(l.Informers) + 1) // the kubelets of other nodes cost an event nothing: cache.Trigger
	r.own = r.ofPods + r.leases + r.small
	r.shared = l.SharedEvents * nodes
	return r
}

// events returns the cores that a service needs for writes and their events, in the processes of the measurement.
func (r *rates) events(m *Measured, name string) float64 {
	return (r.leases*m.CPU[Lease][name] + r.small*m.CPU[ConfigMap][name] + r.pods*m.CPU[Pod][name]) / 1e6
}

// times returns a load of n times the nodes, with n times their work.
func (l Load) times(n float64) Load {
	l.Nodes = int(float64(l.Nodes) * n)
	l.PodsPerSecond *= n
	l.SharedEvents *= n
	l.ListMegabytes *= n
	return l
}

// Largest returns how many nodes of a load fit into all limits, to a hundredth, and the plan of the next larger load.
func Largest(l Load, limits Limits, m *Measured) (nodes int, beyond *Plan) {
	plan := func(n float64) *Plan { return Compute(l.times(n/float64(l.Nodes)), limits, m) }
	low, high := 1.0, 1.0
	for beyond = plan(high); beyond.Walls[0].Use <= 1 && high < maxNodes; beyond = plan(high) {
		low, high = high, high*2
	}
	for high/low > 1.01 {
		middle := math.Sqrt(low * high)
		if p := plan(middle); p.Walls[0].Use <= 1 {
			low = middle
		} else {
			high, beyond = middle, p
		}
	}
	return int(low), beyond
}

// services are in the order of the output.
var services = []string{"gateway", "authn", "authz", "admission", "registry", "watchfanout", "nats", "xds"}

// tier is the service whose processes each read all events, and serve a part of the resources.
const tier = "watchfanout"

// Compute returns the plan of a load.
func Compute(l Load, limits Limits, m *Measured) *Plan {
	r := l.rates()
	p := &Plan{
		Nodes:      l.Nodes,
		Pods:       l.Nodes * l.PodsPerNode,
		Watches:    l.Nodes*(l.SharedWatches+l.OwnWatches) + 2*l.Informers,
		Writes:     r.leases + r.pods + r.small,
		Deliveries: r.shared + r.own,
	}
	small := l.Nodes * (l.SmallObjects + 1) // with the Lease
	p.Objects = p.Pods + l.Nodes + small
	for _, name := range services {
		p.Services = append(p.Services, service(name, l, r, limits, m, float64(p.Pods+l.Nodes), float64(small)))
	}
	p.Walls = walls(p, r, limits, m, float64(p.Pods+l.Nodes)*podKilobytes+float64(small)*smallKilobytes)
	return p
}

// service returns the need of a service for objects as large as pods, and for small objects.
func service(name string, l Load, r rates, limits Limits, m *Measured, pods, small float64) Service {
	requests := r.shared*m.CPU[DeliverShared][name] + r.own*m.CPU[DeliverOwn][name] + r.lists*m.CPU[List][name] +
		float64(l.Nodes*l.SharedWatches)*m.CPU[HoldShared][name] + float64(l.Nodes*l.OwnWatches)*m.CPU[HoldOwn][name]
	shared := requests / 1e6
	watches := float64(l.Nodes*l.SharedWatches)*m.Watch[Shared][name] + float64(l.Nodes*l.OwnWatches)*m.Watch[Own][name]
	pods, small = pods*m.Object[Pod76][name], small*m.Object[ConfigMap1][name]
	s := Service{Name: name, Processes: fewest}
	var each, copies float64
	switch name {
	case tier:
		each = r.events(m, name) / measuredReplicas
		room := max(busy*limits.Cores-each, busy*limits.Cores/2) // walls has the limit of each
		// Further replicas do the work that does not fit beside the largest resource's on its two.
		free := max(0, rpc.ReplicasPerKey*room-r.ofLargest(m))
		s.Processes = rpc.ReplicasPerKey + int(math.Ceil(max(0, shared-r.ofLargest(m)-free)/room))
		copies = rpc.ReplicasPerKey
	case "nats":
		s.Processes = 3 // a quorum
		shared += r.events(m, name)
		copies = float64(s.Processes)
	default:
		shared += r.events(m, name)
		s.Processes = max(s.Processes, int(math.Ceil(shared/(busy*limits.Cores))))
		copies = float64(s.Processes)
	}
	n := float64(s.Processes)
	s.Cores = shared + (each+m.Idle[name])*n
	s.TotalGigabytes = m.Process[name]/1e3*n + (copies*(pods+small)+watches)/1e6
	// The largest process has all pods, and its share of the other resources.
	s.Gigabytes = m.Process[name]/1e3 + (pods+small*copies/n+watches/n)/1e6
	return s
}

// ofLargest returns the cores that the replicas of pods need for their clients. Pods have the most deliveries of all
// resources, and clients list mostly pods.
func (r *rates) ofLargest(m *Measured) float64 {
	return (r.ofPods*m.CPU[DeliverOwn][tier] + r.lists*m.CPU[List][tier]) / 1e6
}

// walls returns the limits that more processes do not move.
func walls(p *Plan, r rates, limits Limits, m *Measured, kilobytes float64) []Wall {
	at := func(name string) Service {
		return p.Services[slices.IndexFunc(p.Services, func(s Service) bool { return s.Name == name })]
	}
	megabytes := (r.pods*podMessage + (r.leases+r.small)*smallMessage) / 1e3
	all := []Wall{
		{"writes of etcd", p.Writes / limits.EtcdWrites,
			"give Leases and Events an etcd of their own (--etcd-servers-overrides)"},
		{"size of etcd", kilobytes / 1e6 / limits.EtcdGigabytes,
			"use an etcd with a higher --quota-backend-bytes, or give a resource an etcd of its own " +
				"(--etcd-servers-overrides)"},
		{"the publisher's core", p.Writes * m.Publisher / 1e6,
			"each etcd of --etcd-servers-overrides has a publisher of its own"},
		{"a watchfanout replica's core for all events", r.events(m, tier) / measuredReplicas,
			"none yet: each replica reads the events of all resources"},
		{"the two watchfanout replicas of a resource", (r.events(m, tier)/measuredReplicas +
			r.ofLargest(m)/rpc.ReplicasPerKey) / (busy * limits.Cores),
			"larger machines for watchfanout; further replicas and an etcd of its own leave a resource two replicas"},
		{"bytes of the event log from NATS", megabytes * float64(at(tier).Processes+at("registry").Processes) /
			limits.NATSMegabytes, "larger machines for watchfanout, so that fewer replicas read the log"},
		{"watchfanout replicas that NATS accepts", float64(at(tier).Processes) / natsConnections,
			"larger machines for watchfanout"},
	}
	for _, s := range p.Services {
		all = append(all, Wall{"memory of a process: " + s.Name, s.Gigabytes / limits.Gigabytes, "a larger machine"})
	}
	slices.SortStableFunc(all, func(a, b Wall) int { return cmp.Compare(b.Use, a.Use) })
	return all
}
