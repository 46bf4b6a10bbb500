package main

import (
	"context"
	"slices"
)

// shape is one hostile request, or several of one kind.
type shape struct {
	family, name string
	// about describes the shape in the report; empty if the name is sufficient.
	about string
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

// shortForm are the shapes of the short form: one or two of most families.
var shortForm = []string{
	"JSON Patch: 22 copies that double",
	"JSON Patch: 10,000 additions",
	"merge patch: strategic: 5,000 items deleted of 5,000",
	"apply: 10 applies beside 1,000 managers",
	"apply: 10,000 keys, twice",
	"body: JSON of 10,000 levels",
	"body: YAML aliases that grow ninefold",
	"body: protobuf, cut short",
	"object: ConfigMap of 1 MB",
	"definition: objects near the budget of CEL",
	"admission: a mutating webhook whose patch copies 22 times",
	"list: 10,000 label terms",
	"list: forged continue tokens",
	"list: Accept of 1,000 clauses",
	"watch: 200 with initial events, dropped at once",
	"watch: 100 unread, 20 updates of 900 kB",
	"identity: 1,000 groups impersonated",
	"review: 500 SubjectAccessReviews",
	"HTTP/1.1: 300 strangers' paths of 900 kB, dropped",
	"HTTP/2: rapid resets of lists",
}
