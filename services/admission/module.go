package admission

import (
	"context"

	"watershed.dev/platform/process"
)

// Module describes admission to the process that runs it: its name, dependencies and options.
var Module = &process.Module{
	Name:      "admission",
	ServesRPC: true,
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, _ *process.Deps) (process.Service, error) {
	return New(ctx, c)
}
