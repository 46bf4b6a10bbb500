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

// modules lists the services in the order in which up starts them: each after the services that it calls. up, split,
// the commands of services and the tests derive everything from this graph.
var modules = []*process.Module{
	registry.Module,
	watchfanout.Module,
	authn.Module,
	authz.Module,
	admission.Module,
	gateway.Module,
}

// moduleOf returns the module with a name, or nil.
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
