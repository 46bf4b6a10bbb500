// Package features implements the flag of Kubernetes' feature gates.
package features

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
)

// AddFlag adds --feature-gates to fs. Setting the flag takes effect immediately, for the whole process. An unknown gate
// is an error. With acceptUnlinked, a kube-apiserver gate that this process does not link is accepted and has no
// effect.
func AddFlag(fs *pflag.FlagSet, acceptUnlinked bool) {
	fs.Var(&gates{acceptUnlinked: acceptUnlinked}, "feature-gates",
		"A set of key=value pairs that describe feature gates for alpha/experimental features, as kube-apiserver's: "+
			"AllAlpha=true,SomeFeature=false.")
}

type gates struct {
	acceptUnlinked bool
	text           string
}

// KnownGates returns the gates that acceptUnlinked accepts.
func KnownGates() []string { return slices.Sorted(maps.Keys(knownGates)) }

// String implements pflag.Value.
func (g *gates) String() string { return g.text }

// Type implements pflag.Value.
func (g *gates) Type() string { return "mapStringBool" }

// Set implements pflag.Value.
func (g *gates) Set(text string) error {
	linked := utilfeature.DefaultMutableFeatureGate.GetAll()
	set := map[string]bool{}
	for _, pair := range strings.Split(text, ",") {
		if pair = strings.TrimSpace(pair); pair == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		if !ok {
			return fmt.Errorf("missing bool value for %s", name)
		}
		on, err := strconv.ParseBool(strings.TrimSpace(value))
		if err != nil {
			return fmt.Errorf("invalid value of %s=%s, err: %w", name, value, err)
		}
		if _, ok := linked[featuregate.Feature(name)]; !ok && g.acceptUnlinked && knownGates[name] {
			continue
		}
		set[name] = on
	}
	g.text = text
	return utilfeature.DefaultMutableFeatureGate.SetFromMap(set)
}
