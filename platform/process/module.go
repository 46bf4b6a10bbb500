// Package process runs any set of services in a process: a single service (its own binary), or several (watershed run,
// up and split). It has the flags, connections, pages and drain that services share, and no service's logic.
// A service does not know if another service is in its process.
//
// Package lifecycle owns the goroutines of the runners. The xDS client has a goroutine that lasts as long as the
// process. Each process also has a goroutine that measures RPCs (rpc.Traffic.Run) and a goroutine that returns memory
// (ReleaseAtRest).
//
// Review notes:
//
//   - Never let a service ask which services share its process. Deps hides it.
//   - Hooks of a service are fields of Service and Options. A type assertion would hide a hook whose name is misspelt.
//   - A contract is served on the network only if a service outside of the process may call it (rpc.AllowedClients).
package process

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// Module describes a service to the process that runs it.
type Module struct {
	// Name is the service's name, and the common name of its certificate on the inner network.
	Name string
	// DependsOn are the services that this service calls. It starts when its process has them ready.
	// rpc.AllowedClients has the methods that the service may call.
	DependsOn []string
	// ServesAPI is set for the service that serves the cluster's API, the gateway.
	ServesAPI bool
	// GCPercent is how much the heap may grow between two garbage collections, in percent; 0: Go's default. The maximum
	// of the process's services applies.
	GCPercent int
	// Options returns the service's options with their defaults.
	Options func() Options
}

// Clients returns the services that may call the contracts of the module's proto package. InternalWatch is in
// watchfanout's package, and registry serves it.
func (m *Module) Clients() []string { return rpc.Clients("/watershed." + m.Name + ".") }

// Options are a service's options. Build builds the service once they are set and valid.
type Options struct {
	AddFlags func(*pflag.FlagSet)
	// Validate returns an error that names the invalid flag, before any service of the process starts.
	Validate func() error
	// StopTimeout returns how long the service may take to stop; nil: lifecycle.StopTimeout.
	StopTimeout func() time.Duration
	// ControlPlane returns the dialer of the egress network controlplane; nil: the service has no egress networks.
	ControlPlane func() (utilnet.DialFunc, error)
	Build        func(context.Context, *Deps) (*Service, error)
}

// Service is a service as its process runs it. The fields after Run may be nil.
type Service struct {
	Register   func(grpc.ServiceRegistrar)
	Collectors []prometheus.Collector
	// Ready returns why the service cannot serve yet.
	Ready *lifecycle.Readiness
	// Run serves until ctx is done.
	Run func(context.Context) error

	// Policies returns why the service rejects requests that need the cluster's policy.
	Policies *lifecycle.Readiness
	// Check returns why the service cannot serve now. It may call other services.
	Check func(context.Context) error
	// Drain ends the service's streams, so that their clients continue at another replica.
	Drain func()
	// Draining reports if the service is shutting down.
	Draining func() bool
	// State returns the service's part of the process's report. It responds within seconds.
	State func(context.Context) any
	// DeepState returns State's value for a deep report, within DeepTimeout; nil: as State.
	DeepState func(context.Context) any
	// Programs returns the reports of the programs that only this service may call. It responds within seconds.
	Programs func(context.Context) []*Report
	// Traffic counts the requests of clients of the cluster; nil: the process counts the RPCs that it serves.
	Traffic *telemetry.Traffic
	// Files is the page of the files that the service reloads, and Status the page of its state.
	Files, Status http.Handler
	// API serves the cluster's API to the other services of the process. A request's context has the user.
	API http.Handler
}

// Deps are the dependencies that a service is built with.
type Deps struct {
	// ID is the service's identity on the inner network.
	ID rpc.TLS
	// Dial connects to another service.
	Dial func(service string) (grpc.ClientConnInterface, error)
	// API is the API of the gateway in this process; nil if the gateway is in another process.
	API API
	// Flags has the flags of the process, with their values.
	Flags *pflag.FlagSet
	// Report returns the report of this process, and Reports the reports of the other processes that the service calls.
	// Reports of the kind Deep have the services' DeepState.
	Report  func(context.Context, Kind) *Report
	Reports func(context.Context, Kind) []*Report
	// Starting receives why the service is not built yet, for the pages and the terminal.
	Starting func(reason error)
	// NATS is the embedded server; nil if the service's options have the addresses of NATS.
	NATS InProcessNATS
}

// API is the API of the gateway in this process, for the other services. The context of a request has the user.
// Requests wait until the gateway is built. The services share values by key (sync.Map).
type API interface {
	http.Handler
	LoadOrStore(key, value any) (actual any, loaded bool)
}

// InProcessNATS is a NATS server in this process (nats.InProcessConnProvider).
type InProcessNATS interface{ InProcessConn() (net.Conn, error) }

// Modules is the table of the services that a program contains.
type Modules []*Module

// Names returns the names of all services.
func (all Modules) Names() (names []string) {
	for _, m := range all {
		names = append(names, m.Name)
	}
	return names
}

// Get returns the module with a name, or nil.
func (all Modules) Get(name string) *Module {
	if i := slices.IndexFunc(all, func(m *Module) bool { return m.Name == name }); i >= 0 {
		return all[i]
	}
	return nil
}

// Sort returns the modules of the targets in their start order: a module comes after the modules that it depends on,
// and the module that serves the API is last. Modules without an order between them keep the order of the table.
func (all Modules) Sort(targets []string) (sorted Modules, err error) {
	for _, name := range targets {
		if all.Get(name) == nil {
			return nil, fmt.Errorf("--target=%s: no such service: want any of %s", name,
				strings.Join(all.Names(), ", "))
		}
	}
	var add func(m *Module)
	add = func(m *Module) {
		if m == nil || !slices.Contains(targets, m.Name) || slices.Contains(sorted, m) {
			return
		}
		for _, name := range m.DependsOn {
			add(all.Get(name))
		}
		sorted = append(sorted, m)
	}
	for _, last := range []bool{false, true} {
		for _, m := range all {
			if m.ServesAPI == last {
				add(m)
			}
		}
	}
	return sorted, nil
}
