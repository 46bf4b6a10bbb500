package main

import (
	"context"
	"errors"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/admission"
	"watershed.dev/services/authn"
	"watershed.dev/services/authz"
	"watershed.dev/services/gateway"
	"watershed.dev/services/registry"
	"watershed.dev/services/watchfanout"
)

// module is a service as the commands see it. The graph of modules is all that up, split, the services' own commands
// and the tests know of them.
type module struct {
	name string
	// calls are the services that it calls, and that are built before it where all are in one process. Which of their
	// methods it may call is in rpc.Callers.
	calls []string
	// serves: it offers RPCs.
	serves bool
	// settings returns the service's settings at their defaults.
	settings func() settings
}

// settings are a service's, and build it once they are set.
type settings interface {
	AddFlags(*pflag.FlagSet)
	build(context.Context, *deps) (service, error)
}

// service is what every service is to the command that runs it.
type service interface {
	Register(grpc.ServiceRegistrar)
	Collectors() []prometheus.Collector
	// Ready is why the service cannot serve yet.
	Ready() *lifecycle.Readiness
	// Run serves until ctx is done.
	Run(context.Context) error
}

// deps is what a service is built with.
type deps struct {
	// id is the service's identity on the inner network.
	id rpc.TLS
	// dial connects to another service.
	dial func(service string, b rpc.Balancer) (grpc.ClientConnInterface, error)
	// log sets the connection to an embedded NATS.
	log func(*eventlog.Options)
}

// modules are in the order in which they start where all are in one process: each after those that it calls.
var modules = []*module{
	{
		name:     "registry",
		serves:   true,
		settings: func() settings { return &settingsOf[*registry.Config]{registry.NewConfig(), newRegistry} },
	},
	{
		name:     "watchfanout",
		serves:   true,
		calls:    []string{"registry"},
		settings: func() settings { return &settingsOf[*watchfanout.Config]{watchfanout.NewConfig(), newWatchfanout} },
	},
	{
		name:     "authn",
		serves:   true,
		settings: func() settings { return &settingsOf[*authn.Config]{authn.NewConfig(), newAuthn} },
	},
	{
		name:     "authz",
		serves:   true,
		settings: func() settings { return &settingsOf[*authz.Config]{authz.NewConfig(), newAuthz} },
	},
	{
		name:     "admission",
		serves:   true,
		settings: func() settings { return &settingsOf[*admission.Config]{admission.NewConfig(), newAdmission} },
	},
	{
		name:     "gateway",
		calls:    []string{"authn", "authz", "admission", "registry", "watchfanout"},
		settings: func() settings { return &settingsOf[*gateway.Config]{gateway.NewConfig(), newGateway} },
	},
}

// moduleOf is the module with a name, or nil.
func moduleOf(name string) *module {
	i := slices.IndexFunc(modules, func(m *module) bool { return m.name == name })
	if i < 0 {
		return nil
	}
	return modules[i]
}

func moduleNames() (names []string) {
	for _, m := range modules {
		names = append(names, m.name)
	}
	return names
}

// settingsOf is a service's own Config with its constructor.
type settingsOf[C interface{ AddFlags(*pflag.FlagSet) }] struct {
	config C
	new    func(context.Context, C, *deps) (service, error)
}

func (s *settingsOf[C]) AddFlags(fs *pflag.FlagSet) { s.config.AddFlags(fs) }

func (s *settingsOf[C]) build(ctx context.Context, d *deps) (service, error) {
	return s.new(ctx, s.config, d)
}

func newRegistry(ctx context.Context, c *registry.Config, d *deps) (service, error) {
	d.log(&c.Log)
	return registry.New(ctx, c, registry.Deps{ID: d.id})
}

func newWatchfanout(ctx context.Context, c *watchfanout.Config, d *deps) (service, error) {
	d.log(&c.Log)
	conn, err := d.dial("registry", rpc.TakeTurns)
	if err != nil {
		return nil, err
	}
	return watchfanout.New(ctx, c, watchfanout.Deps{
		ID:      d.id,
		Source:  registryv1.NewSourceClient(conn),
		Catalog: registryv1.NewCatalogClient(conn),
	})
}

func newAuthn(ctx context.Context, c *authn.Config, _ *deps) (service, error) {
	return authn.New(ctx, c)
}

func newAuthz(ctx context.Context, c *authz.Config, _ *deps) (service, error) {
	return authz.New(ctx, c)
}

func newAdmission(ctx context.Context, c *admission.Config, _ *deps) (service, error) {
	return admission.New(ctx, c)
}

func newGateway(ctx context.Context, c *gateway.Config, d *deps) (service, error) {
	var errs []error
	dial := func(name string, b rpc.Balancer) grpc.ClientConnInterface {
		conn, err := d.dial(name, b)
		errs = append(errs, err)
		return conn
	}
	authnConn := dial("authn", rpc.TakeTurns)
	authzConn := dial("authz", rpc.TakeTurns)
	admissionConn := dial("admission", rpc.TakeTurns)
	registryConn := dial("registry", rpc.TakeTurns)
	watchfanoutConn := dial("watchfanout", rpc.ByKey)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return gateway.New(ctx, c, gateway.Deps{
		Authn:     authnv1.NewAuthnClient(authnConn),
		Authz:     authzv1.NewAuthzClient(authzConn),
		Admission: admissionv1.NewAdmissionClient(admissionConn),
		Objects:   registryv1.NewObjectsClient(registryConn),
		Catalog:   registryv1.NewCatalogClient(registryConn),
		Source:    registryv1.NewSourceClient(registryConn),
		Policy:    watchfanoutv1.NewPolicyClient(registryConn),
		Watch:     watchfanoutv1.NewWatchClient(watchfanoutConn),
	})
}
