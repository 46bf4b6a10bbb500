// Package process runs services: each as a process of its own (Main), or several as parts of one (cmd/watershed's up).
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

// Module is a service as whoever runs it sees it: all that it needs and offers.
type Module struct {
	// Name is the service's, and the common name of its identity on the inner network.
	Name string
	// DependsOn are the services that it calls, and that are built before it where all are in one process. Which of their
	// methods it may call is in rpc.Callers.
	DependsOn []string
	// ServesRPC: it offers RPCs.
	ServesRPC bool
	// Options returns the service's settings at their defaults.
	Options func() Options
}

// Options are a service's, and build it once they are set.
type Options interface {
	AddFlags(*pflag.FlagSet)
	Build(context.Context, *Deps) (Service, error)
}

// Service is what every service is to the process that runs it.
type Service interface {
	Register(grpc.ServiceRegistrar)
	Collectors() []prometheus.Collector
	// Ready is why the service cannot serve yet.
	Ready() *lifecycle.Readiness
	// Run serves until ctx is done.
	Run(context.Context) error
}

// Deps is what a service is built with.
type Deps struct {
	// ID is the service's identity on the inner network.
	ID rpc.TLS
	// Dial connects to another service.
	Dial func(service string) (grpc.ClientConnInterface, error)
	// NATS is the embedded server; nil where the service's settings say where NATS is.
	NATS InProcessNATS
}

// InProcessNATS is a NATS server in this process (nats.InProcessConnProvider).
type InProcessNATS interface{ InProcessConn() (net.Conn, error) }

// OptionsOf is a service's own Config with its constructor.
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
