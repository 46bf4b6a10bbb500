package watchfanout

import (
	"context"

	"watershed.dev/platform/process"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Module describes watchfanout to the process that runs it: its name, dependencies and options. Its heap is mostly
// encoded objects, which the garbage collector does not scan, so collections are cheap.
var Module = &process.Module{
	Name:      "watchfanout",
	DependsOn: []string{"registry"},
	GCPercent: 50,
	Options:   options,
}

func options() process.Options {
	c := NewConfig()
	return process.Options{
		AddFlags: c.AddFlags,
		Validate: c.Validate,
		Build: func(ctx context.Context, d *process.Deps) (*process.Service, error) {
			c.Log.Conn = d.NATS
			conn, err := d.Dial("registry")
			if err != nil {
				return nil, err
			}
			s, err := New(c, Deps{
				ID:        d.ID,
				Source:    registryv1.NewSourceClient(conn),
				Discovery: registryv1.NewDiscoveryClient(conn),
			})
			if err != nil {
				return nil, err
			}
			return &process.Service{
				Register:   s.Register,
				Collectors: s.Collectors(),
				Ready:      s.Ready(),
				Run:        s.Run,
				Drain:      s.Drain,
				Status:     s,
				State:      s.state,
				DeepState:  s.deepState,
			}, nil
		},
	}
}
