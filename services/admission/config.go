package admission

import (
	"errors"

	"github.com/spf13/pflag"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
)

// Config is the configuration of admission: kube-apiserver's admission flags, and the way to the gateway.
type Config struct {
	Options           *kubeoptions.AdmissionOptions
	Kubeconfig        string
	AggregatorRouting bool
	Hooks             HookOptions
	Freshness         apiclient.Freshness
	Egress            egress.Config
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{Options: kubeoptions.NewAdmissionOptions()} }

// AddFlags adds every option to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Options.AddFlags(fs)
	c.Freshness.AddFlags(fs)
	c.Egress.AddFlags(fs)
	c.Hooks.AddFlags(fs)
	fs.BoolVar(&c.AggregatorRouting, "enable-aggregator-routing", false,
		"Turns on routing of webhook calls to endpoints' addresses rather than to cluster IPs.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"Kubeconfig of the gateway, for the objects that plugins read.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	return errors.Join(append(c.Options.Validate(), c.Hooks.Validate())...)
}
