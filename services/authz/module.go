package authz

import (
	"context"

	"watershed.dev/platform/process"
)

// Module describes authz to the process that runs it: its name, dependencies and options.
var Module = &process.Module{
	Name:      "authz",
	ServesRPC: true,
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, _ *process.Deps) (process.Service, error) {
	return New(ctx, c)
}
