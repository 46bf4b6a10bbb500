package authn

import (
	"context"

	"watershed.dev/platform/process"
)

// Module is authn as whoever runs it sees it.
var Module = &process.Module{
	Name:      "authn",
	ServesRPC: true,
	Options:   func() process.Options { return process.OptionsOf(NewConfig(), build) },
}

func build(ctx context.Context, c *Config, _ *process.Deps) (process.Service, error) {
	return New(ctx, c)
}
