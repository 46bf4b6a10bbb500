package main

import (
	"slices"

	"watershed.dev/platform/process"
	"watershed.dev/services/admission"
	"watershed.dev/services/authn"
	"watershed.dev/services/authz"
	"watershed.dev/services/gateway"
	"watershed.dev/services/registry"
	"watershed.dev/services/watchfanout"
)

// modules are the services, in the order in which they start where all are in one process: each after those that it
// calls. This graph is all that up, split, the services' own commands and the tests know of them.
var modules = []*process.Module{
	registry.Module,
	watchfanout.Module,
	authn.Module,
	authz.Module,
	admission.Module,
	gateway.Module,
}

// moduleOf is the module with a name, or nil.
func moduleOf(name string) *process.Module {
	i := slices.IndexFunc(modules, func(m *process.Module) bool { return m.Name == name })
	if i < 0 {
		return nil
	}
	return modules[i]
}

func moduleNames() (names []string) {
	for _, m := range modules {
		names = append(names, m.Name)
	}
	return names
}
