package cluster

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"watershed.dev/test/harness"
)

var placed = flag.String("placement", "split", "the first placement of the services: split or compact")

// placements maps a placement to its Deployments, in the order in which a rolling upgrade replaces them.
var placements = map[string][]string{
	"split":   {"registry", "gateway", "watchfanout", "authn", "authz", "admission", "xds"},
	"compact": {"front", "watchfanout", "xds"},
}

// other maps a placement to the other placement, and entry a placement to the Deployment that clients reach.
var (
	other = map[string]string{"split": "compact", "compact": "split"}
	entry = map[string]string{"split": "gateway", "compact": "front"}
)

func (h *hosted) services() []string { return placements[h.placement] }

// image returns the name of a Deployment's image.
func image(deployment string) string {
	if deployment == "front" {
		return "watershed.dev/watershed"
	}
	return "watershed.dev/" + deployment
}

// overlay writes overlays/dev in a placement, with the current images, and returns its directory. Jaeger's own image
// cannot be pulled here.
func (h *hosted) overlay(placement string) string {
	h.Helper()
	dir, err := os.MkdirTemp(filepath.Join(harness.Root(), ".build"), "cluster")
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { os.RemoveAll(dir) })
	text := `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: watershed
resources: [../../deploy/k8s/overlays/dev]
images:
- {name: jaegertracing/all-in-one, newName: watershed.dev/jaeger, newTag: test}
`
	for _, s := range placements[placement] {
		if h.tag != "" {
			text += fmt.Sprintf("- {name: %s, newTag: %s}\n", image(s), h.tag)
		}
	}
	text += "components:\n"
	if placement == "compact" {
		text += "- ../../deploy/k8s/components/compact\n"
	}
	if *issued {
		text += "- ../../deploy/k8s/components/cert-manager\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		h.Fatal(err)
	}
	return dir
}

// place changes the placement in the steps of docs/operators/upgrade.md.
func (h *hosted) place(placement string) {
	h.Helper()
	apply := func(args ...string) {
		h.outer.Kubectl(append([]string{"apply", "-k", h.overlay(placement)}, args...)...)
	}
	remove := func(kinds string, names ...string) {
		h.outer.Kubectl(append([]string{"-n", "watershed", "delete", kinds, "--cascade=foreground"}, names...)...)
	}
	if placement == "compact" {
		apply("-l", "app.kubernetes.io/name=front")
		h.rollout("watershed", "deployment/front")
		apply("-l", "watershed.dev/entry=yes")
		remove("deployment", "gateway")
		apply()
		h.rollout("watershed", "deployment/xds")
		remove("deployment", "registry", "authn", "authz", "admission")
		remove("service", "authn", "authz", "admission")
		remove("poddisruptionbudget", "gateway", "registry", "authn", "authz", "admission")
	} else {
		apply("-l", "watershed.dev/entry!=yes")
		for _, s := range placements["split"] {
			h.rollout("watershed", "deployment/"+s)
		}
		apply()
		remove("deployment", "front")
		remove("poddisruptionbudget", "front")
	}
	h.placement = placement
	for _, s := range h.services() {
		h.has(s, 1)
	}
}
