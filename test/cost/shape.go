package main

import (
	"context"
	"slices"
)

// shape is one hostile request, or several of a kind.
type shape struct {
	family, name string
	// about describes the shape in the report; empty if the name says enough.
	about string
	// short selects the shape for the short form.
	short bool
	// setup prepares the shape as an administrator. Its cost is not measured.
	setup func(a *attempt) error
	// run sends the requests. The attempt records their statuses.
	run func(ctx context.Context, a *attempt)
}

func (s *shape) String() string { return s.family + ": " + s.name }

// shapes returns all shapes, family by family.
func shapes() []*shape {
	families := []struct {
		name   string
		shapes []*shape
	}{
		{"JSON Patch", jsonPatches()},
		{"merge patch", mergePatches()},
		{"apply", applies()},
		{"body", bodies()},
		{"object", objects()},
		{"definition", definitions()},
		{"conversion", conversions()},
		{"admission", admissions()},
		{"list", lists()},
		{"watch", watches()},
		{"identity", identities()},
		{"review", reviews()},
		{"limit", limits()},
		{"HTTP/1.1", connections()},
		{"HTTP/2", frames()},
		{"upgrade", upgrades()},
		{"aggregation", aggregations()},
		{"discovery", discoveries()},
	}
	var all []*shape
	for _, f := range families {
		for _, s := range f.shapes {
			s.family = f.name
		}
		all = append(all, f.shapes...)
	}
	return slices.Clip(all)
}
