package registry

import (
	"context"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/process"
)

// Module describes the registry to the process that runs it: its name, dependencies and options.
var Module = &process.Module{Name: "registry", Options: options}

func options() process.Options {
	c := NewConfig()
	return process.Options{
		AddFlags:     c.AddFlags,
		Validate:     c.Validate,
		ControlPlane: c.Egress.OpenControlPlane,
		Build: func(ctx context.Context, d *process.Deps) (*process.Service, error) {
			c.Log.Conn = d.NATS
			var gateway *apiclient.Conn
			if d.API != nil || c.Kubeconfig != "" {
				var err error
				if gateway, err = apiclient.Connect(d.API, c.Kubeconfig, "registry"); err != nil {
					return nil, err
				}
			}
			s, err := New(ctx, c, Deps{ID: d.ID, Starting: d.Starting, Gateway: gateway})
			if err != nil {
				return nil, err
			}
			return &process.Service{
				Register:   s.Register,
				Collectors: s.Collectors(),
				Ready:      s.Ready(),
				Run:        s.Run,
				State:      func(ctx context.Context) any { return s.state(ctx) },
				Programs:   s.programs,
			}, nil
		},
	}
}
