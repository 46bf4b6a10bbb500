package handlers_test

import (
	"fmt"
	"slices"
	"testing"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// deletecollection deletes each object that the options select.
func TestDeleteCollection(t *testing.T) {
	fx := fixture.New(t)
	var made []write
	for i := range 6 {
		made = append(made, write{
			verb: "create",
			body: configMap(fmt.Sprint("c", i), fmt.Sprintf(`,"labels":{"odd":"%v"}}`, i%2 == 1)),
			code: 201,
		})
	}
	run(t, fx, made...)
	names := func() (all []string) {
		body, err := fx.List(t.Context(), fixture.ConfigMaps, &registryv1.GetRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range decodeObject(t, body).Items {
			all = append(all, o.Metadata.Name)
		}
		return all
	}
	run(t, fx,
		write{verb: "deletecollection", query: "labelSelector=odd%3Dtrue&dryRun=All", code: 200},
		write{verb: "deletecollection", query: "labelSelector=odd%3D%3D%3D", fails: "400 BadRequest"},
	)
	if got := names(); len(got) != 6 {
		t.Errorf("%q are left", got)
	}
	run(t, fx, write{verb: "deletecollection", query: "labelSelector=odd%3Dtrue", code: 200})
	if got := names(); !slices.Equal(got, []string{"c0", "c2", "c4"}) {
		t.Errorf("%q are left", got)
	}
}
