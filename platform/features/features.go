// Package features implements the flag of Kubernetes' feature gates. It rejects the gates that Watershed would ignore.
package features

import (
	"strings"

	"github.com/spf13/pflag"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// kube-apiserver adds the gates of logging in its main package.
func init() { utilruntime.Must(logsapi.AddFeatureGates(utilfeature.DefaultMutableFeatureGate)) }

// AddFlag adds --feature-gates to fs. Setting the flag takes effect immediately, for the whole process. A gate that the
// process does not link is an error, and so is a value that Watershed does not implement.
func AddFlag(fs *pflag.FlagSet) {
	fs.Var(&gates{}, "feature-gates",
		"A set of key=value pairs that describe feature gates for alpha/experimental features, as kube-apiserver's: "+
			"AllAlpha=true,SomeFeature=false.")
}

type gates struct{ text string }

// String implements pflag.Value.
func (g *gates) String() string { return g.text }

// Type implements pflag.Value.
func (g *gates) Type() string { return "mapStringBool" }

// Set implements pflag.Value.
func (g *gates) Set(text string) error {
	g.text = text
	pairs := strings.Split(text, ",")
	for i := range pairs { // kube-apiserver accepts the name of the component, which has no other
		pairs[i] = strings.TrimPrefix(strings.TrimSpace(pairs[i]), "kube:")
	}
	if err := utilfeature.DefaultMutableFeatureGate.Set(strings.Join(pairs, ",")); err != nil {
		return err
	}
	return checkReplaced()
}
