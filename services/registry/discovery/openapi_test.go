package discovery

import (
	"crypto/sha512"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// The index has the hash of each document's content. A document is built again only after its inputs have changed.
func TestTheIndexHasTheHashesOfDocuments(t *testing.T) {
	const apps, version = "apis/apps/v1", "version"
	d := New(fixture.New(t).Resources)
	set := func(openapi map[string]string) string {
		t.Helper()
		d.current.Set(&registryv1.DiscoveryResponse{Openapi: openapi})
		index, err := d.encoded(t.Context(), "v3")
		if err != nil {
			t.Fatal(err)
		}
		return string(index)
	}
	index := set(map[string]string{"v2": "1", "v3/" + apps: "1", "v3/" + version: "1", "v3/apis/none/v1": "1"})
	document, err := d.encoded(t.Context(), "v3/"+apps)
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf(`"%s":{"serverRelativeURL":"/openapi/v3/%s?hash=%X"}`, apps, apps, sha512.Sum512(document))
	if !strings.Contains(index, url) || !strings.Contains(index, "/openapi/v3/"+version+"?hash=") ||
		strings.Contains(index, "none") {
		t.Errorf("%s", index)
	}
	d.hashes[apps] = documentHash{"1", "KEPT"}
	if index := set(map[string]string{"v3/" + apps: "1"}); !strings.Contains(index, "?hash=KEPT") {
		t.Errorf("the document is built again: %s", index)
	}
	if index := set(map[string]string{"v3/" + apps: "2"}); !strings.Contains(index, url) || len(d.hashes) != 1 {
		t.Errorf("with other inputs: %s, %d hashes", index, len(d.hashes))
	}
}

// A registry that is behind a gateway's view waits for the inputs of the view, and otherwise names the inputs that it
// has.
func TestADocumentWaitsForItsInputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &Discovery{}
		set := func(inputs string) {
			d.current.Set(&registryv1.DiscoveryResponse{Openapi: map[string]string{"v2": inputs}})
		}
		set("1")
		if got := d.awaitInputs(t.Context(), "v2", ""); got != "1" {
			t.Errorf("without wanted inputs: %q", got)
		}
		time.AfterFunc(inputsTimeout/2, func() { set("2") })
		if got := d.awaitInputs(t.Context(), "v2", "2"); got != "2" {
			t.Errorf("while the registry catches up: %q", got)
		}
		if got := d.awaitInputs(t.Context(), "v2", "1"); got != "2" {
			t.Errorf("ahead of the view: %q", got)
		}
	})
}
