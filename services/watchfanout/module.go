package watchfanout

import (
	"context"

	"watershed.dev/platform/process"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Module describes watchfanout to the process that runs it: its name, dependencies and options.
var Module = &process.Module{
	Name:      "watchfanout",
	ServesRPC: true,
	DependsOn: []string{"registry"},
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, d *process.Deps) (process.Service, error) {
	c.Log.Conn = d.NATS
	conn, err := d.Dial("registry")
	if err != nil {
		return nil, err
	}
	return New(ctx, c, Deps{
		ID:        d.ID,
		Source:    registryv1.NewSourceClient(conn),
		Discovery: registryv1.NewDiscoveryClient(conn),
	})
}
