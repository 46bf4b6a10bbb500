package authz

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
)

// Config is the configuration of authz: kube-apiserver's authorization flags, and the way to the gateway.
type Config struct {
	Options    *kubeoptions.BuiltInAuthorizationOptions
	Kubeconfig string
	Freshness  apiclient.Freshness
	Egress     egress.Config
}

// NewConfig returns the defaults: Node and RBAC.
func NewConfig() *Config {
	o := kubeoptions.NewBuiltInAuthorizationOptions()
	o.Modes = []string{"Node", "RBAC"}
	return &Config{Options: o}
}

// AddFlags adds every option to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Options.AddFlags(fs)
	c.Freshness.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "Kubeconfig of the gateway, for reading the policies.")
}

// Validate completes the options, and returns an error that names the invalid flag.
func (c *Config) Validate() error {
	errs := append(c.Options.Complete(), c.Options.Validate()...)
	for i, err := range errs {
		if file := c.Options.AuthorizationConfigurationFile; file != "" && !strings.Contains(err.Error(), "--") {
			errs[i] = fmt.Errorf("--authorization-config %q: %w", file, err)
		}
	}
	return errors.Join(errs...)
}
