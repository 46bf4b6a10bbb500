package registry

import (
	"context"

	"watershed.dev/platform/process"
)

// Module is the registry as platform/process runs it.
var Module = &process.Module{
	Name:      "registry",
	ServesRPC: true,
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, d *process.Deps) (process.Service, error) {
	c.Log.Conn = d.NATS
	return New(ctx, c, Deps{ID: d.ID})
}
