package authn

import (
	"context"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/process"
)

// Module describes authn to the process that runs it: its name, dependencies and options.
var Module = &process.Module{Name: "authn", Options: options}

func options() process.Options {
	c := NewConfig()
	return process.Options{
		AddFlags:     c.AddFlags,
		Validate:     c.Validate,
		ControlPlane: c.Egress.OpenControlPlane,
		Build: func(ctx context.Context, d *process.Deps) (*process.Service, error) {
			cluster, err := apiclient.Connect(d.API, c.Kubeconfig, "authn")
			if err != nil {
				return nil, err
			}
			s, err := New(ctx, c, cluster)
			if err != nil {
				return nil, err
			}
			return &process.Service{
				Register:   s.Register,
				Collectors: s.Collectors(),
				Ready:      s.Ready(),
				Run:        s.Run,
				Files:      s.Files(),
			}, nil
		},
	}
}
