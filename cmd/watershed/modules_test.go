package main

import (
	"slices"
	"strings"
	"testing"

	"watershed.dev/platform/rpc"
)

// A service depends on exactly the services whose methods it may call (rpc.AllowedClients).
func TestModulesDependOnAllowedServices(t *testing.T) {
	// offered names the service of a contract, if their names differ.
	offered := map[string]string{"/watershed.watchfanout.v1.InternalWatch": "registry"}
	allowed := map[string][]string{}
	for method, callers := range rpc.AllowedClients {
		contract := method[:strings.LastIndexByte(method, '/')]
		if !strings.HasPrefix(contract, "/watershed.") || contract == "/watershed.process.v1.Processes" {
			continue // a method of the xDS server, which is not a module, or of every process
		}
		callee := offered[contract]
		if callee == "" {
			callee = strings.Split(contract, ".")[1]
		}
		for _, c := range callers {
			if !slices.Contains(allowed[c], callee) {
				allowed[c] = append(allowed[c], callee)
			}
		}
		if modules.Get(callee) == nil {
			t.Errorf("%s is offered by no module", method)
		}
	}
	for _, m := range modules {
		calls, may := slices.Sorted(slices.Values(m.DependsOn)), slices.Sorted(slices.Values(allowed[m.Name]))
		if !slices.Equal(calls, may) {
			t.Errorf("%s calls %v, and may call %v", m.Name, calls, may)
		}
		delete(allowed, m.Name)
	}
	for name := range allowed {
		t.Errorf("%q may call and is no module", name)
	}
}

// Every placement runs every service exactly once.
func TestPlacementsHaveEveryService(t *testing.T) {
	want := slices.Sorted(slices.Values(modules.Names()))
	for name, sets := range placements {
		var all []string
		for _, s := range sets {
			all = append(all, s.targets...)
		}
		if slices.Sort(all); !slices.Equal(all, want) {
			t.Errorf("%s runs %v", name, all)
		}
	}
}
