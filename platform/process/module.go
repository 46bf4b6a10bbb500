// Package process runs services: a service in its own process (Main), or several services in a shared process
// (cmd/watershed's up). It has the flags, pages, drain and GC pace that services share, and no service's logic.
//
// Package lifecycle owns the goroutines of the runners. The xDS client has a goroutine that lasts as long as the
// process.
package process

import (
	"context"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
)

// Module describes a service to the process that runs it.
type Module struct {
	// Name is the service's name, and the common name of its certificate on the inner network.
	Name string
	// DependsOn are the services that this service calls. A process with several services builds them first.
	// rpc.AllowedClients has the methods that the service may call.
	DependsOn []string
	// ServesRPC is set if the service serves RPCs.
	ServesRPC bool
	// Options returns the service's options with their defaults.
	Options func() Options
}

// Options are a service's options. Build builds the service once they are set.
type Options interface {
	AddFlags(*pflag.FlagSet)
	Build(context.Context, *Deps) (Service, error)
}

// Service is a service as its process runs it.
type Service interface {
	Register(grpc.ServiceRegistrar)
	Collectors() []prometheus.Collector
	// Ready returns why the service cannot serve yet.
	Ready() *lifecycle.Readiness
	// Run serves until ctx is done.
	Run(context.Context) error
}

// Deps are the dependencies that a service is built with.
type Deps struct {
	// ID is the service's identity on the inner network.
	ID rpc.TLS
	// Dial connects to another service.
	Dial func(service string) (grpc.ClientConnInterface, error)
	// NATS is the embedded server; nil if the service's options have the addresses of NATS.
	NATS InProcessNATS
}

// InProcessNATS is a NATS server in this process (nats.InProcessConnProvider).
type InProcessNATS interface{ InProcessConn() (net.Conn, error) }

// OptionsOf returns the Options of a service with its Config and its constructor.
func OptionsOf[C interface{ AddFlags(*pflag.FlagSet) }](config C,
	build func(context.Context, C, *Deps) (Service, error)) Options {
	return &optionsOf[C]{config, build}
}

type optionsOf[C interface{ AddFlags(*pflag.FlagSet) }] struct {
	config C
	build  func(context.Context, C, *Deps) (Service, error)
}

func (s *optionsOf[C]) AddFlags(fs *pflag.FlagSet) { s.config.AddFlags(fs) }

func (s *optionsOf[C]) Build(ctx context.Context, d *Deps) (Service, error) {
	return s.build(ctx, s.config, d)
}

// AddFlags adds the flags of the module's own command to fs: the flags of its process and of its service.
func (m *Module) AddFlags(fs *pflag.FlagSet) { (&process{}).addFlags(fs, m) }
