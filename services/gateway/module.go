package gateway

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Module describes the gateway to the process that runs it: its name, dependencies and options.
var Module = &process.Module{
	Name:      "gateway",
	DependsOn: []string{"authn", "authz", "admission", "registry", "watchfanout"},
	ServesAPI: true,
	Options:   options,
}

func options() process.Options {
	c := NewConfig()
	return process.Options{
		AddFlags:     c.AddFlags,
		Validate:     c.Validate,
		ControlPlane: c.Egress.OpenControlPlane,
		StopTimeout:  c.stopTimeout,
		Build: func(ctx context.Context, d *process.Deps) (*process.Service, error) {
			deps, err := dial(d)
			if err != nil {
				return nil, err
			}
			g, err := New(ctx, c, deps)
			if err != nil {
				return nil, err
			}
			return &process.Service{
				Register:   func(grpc.ServiceRegistrar) {}, // clients call the gateway over HTTPS only
				Collectors: g.Collectors(),
				Ready:      g.Ready(),
				Run:        g.Run,
				Check:      g.Check,
				Draining:   g.Draining,
				Traffic:    &g.traffic,
				Files:      g.Files(),
				API:        g.API(),
			}, nil
		},
	}
}

// maxWait bounds how long a call to authn, authz or admission waits for a ready replica. The deadline of the call is
// later, because the replica may wait for a webhook.
const maxWait = 10 * time.Second

// dial returns the clients of the other services.
func dial(d *process.Deps) (Deps, error) {
	var errs []error
	dial := func(name string) grpc.ClientConnInterface {
		conn, err := d.Dial(name)
		errs = append(errs, err)
		return rpc.WithSteps(conn)
	}
	dialBounded := func(name string) grpc.ClientConnInterface { return rpc.WithMaxWait(dial(name), maxWait) }
	registryConn := dial("registry")
	return Deps{
		Flags:         d.Flags,
		Report:        d.Report,
		Reports:       d.Reports,
		Authn:         authnv1.NewAuthnClient(dialBounded("authn")),
		Authz:         authzv1.NewAuthzClient(dialBounded("authz")),
		Admission:     admissionv1.NewAdmissionClient(dialBounded("admission")),
		Objects:       registryv1.NewObjectsClient(registryConn),
		Discovery:     registryv1.NewDiscoveryClient(registryConn),
		Source:        registryv1.NewSourceClient(registryConn),
		InternalWatch: watchfanoutv1.NewInternalWatchClient(registryConn),
		Watch:         watchfanoutv1.NewWatchClient(dial("watchfanout")),
	}, errors.Join(errs...)
}
