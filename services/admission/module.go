package admission

import (
	"context"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/process"
)

// Module describes admission to the process that runs it: its name, dependencies and options.
var Module = &process.Module{Name: "admission", Options: options}

func options() process.Options {
	c := NewConfig()
	return process.Options{
		AddFlags:     c.AddFlags,
		Validate:     c.Validate,
		ControlPlane: c.Egress.OpenControlPlane,
		Build: func(ctx context.Context, d *process.Deps) (*process.Service, error) {
			cluster, err := apiclient.Connect(d.API, c.Kubeconfig, "admission")
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
				Policies:   s.Policies(),
				State:      func(context.Context) any { return s.hooks.state() },
			}, nil
		},
	}
}
