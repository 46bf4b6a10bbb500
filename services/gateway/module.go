package gateway

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	"watershed.dev/platform/process"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Module is the gateway's entry for platform/process: its name, its dependencies, its flags and its constructor.
var Module = &process.Module{
	Name:      "gateway",
	DependsOn: []string{"authn", "authz", "admission", "registry", "watchfanout"},
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, d *process.Deps) (process.Service, error) {
	var errs []error
	dial := func(name string) grpc.ClientConnInterface {
		conn, err := d.Dial(name)
		errs = append(errs, err)
		return conn
	}
	authnConn := dial("authn")
	authzConn := dial("authz")
	admissionConn := dial("admission")
	registryConn := dial("registry")
	watchfanoutConn := dial("watchfanout")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return New(ctx, c, Deps{
		Authn:         authnv1.NewAuthnClient(authnConn),
		Authz:         authzv1.NewAuthzClient(authzConn),
		Admission:     admissionv1.NewAdmissionClient(admissionConn),
		Objects:       registryv1.NewObjectsClient(registryConn),
		Discovery:     registryv1.NewDiscoveryClient(registryConn),
		Source:        registryv1.NewSourceClient(registryConn),
		InternalWatch: watchfanoutv1.NewInternalWatchClient(registryConn),
		Watch:         watchfanoutv1.NewWatchClient(watchfanoutConn),
	})
}
