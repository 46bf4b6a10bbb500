package authn

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
)

// Config is the configuration of authn: kube-apiserver's authentication flags, and the way to the gateway.
type Config struct {
	Options    *kubeoptions.BuiltInAuthenticationOptions
	Kubeconfig string
	// ServicesCAFile is the authority of the client certificates of authn, authz, admission and registry. If it is
	// empty, the cluster's client CA signs them.
	ServicesCAFile string
	// BasicAuthFile has users and passwords; empty disables basic authentication.
	BasicAuthFile string
	// SigningEndpoint is the socket of an external signer of service account tokens, which provides the public keys.
	SigningEndpoint string
	// CacheTTL bounds how long a gateway caches a response. A revoked token or certificate is accepted for that long.
	CacheTTL  time.Duration
	Freshness apiclient.Freshness
	Egress    egress.Config
}

// NewConfig returns the defaults.
func NewConfig() *Config {
	return &Config{Options: kubeoptions.NewBuiltInAuthenticationOptions().WithAll()}
}

// AddFlags adds every option to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Options.AddFlags(fs)
	c.Freshness.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"Kubeconfig of the gateway, for the objects that token authentication looks up.")
	fs.StringVar(&c.ServicesCAFile, "services-client-ca-file", "",
		"The certificate authority of authn's, authz's and admission's client certificates. Empty: --client-ca-file "+
			"signs them. It authenticates no other client.")
	fs.StringVar(&c.BasicAuthFile, "basic-auth-file", "",
		"A file of users for HTTP basic authentication, one line each: "+
			"password,user,uid[,\"group1,group2\"]. "+
			"A password may be a bcrypt hash. Kubernetes removed this in 1.19: passwords in files do not expire. "+
			"Empty: off.")
	fs.StringVar(&c.SigningEndpoint, "service-account-signing-endpoint", "",
		"Path to the socket where an external JWT signer is listening. This flag is mutually exclusive with "+
			"--service-account-signing-key-file and --service-account-key-file.")
	fs.DurationVar(&c.CacheTTL, "authentication-cache-ttl", 10*time.Second,
		"How long a gateway may reuse a response for the same credentials.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	accounts := c.Options.ServiceAccounts
	if accounts != nil && c.SigningEndpoint != "" && len(accounts.KeyFiles) > 0 {
		return fmt.Errorf("--service-account-key-file %q cannot be given with --service-account-signing-endpoint: "+
			"the signer provides the keys; omit the former", accounts.KeyFiles)
	}
	if c.SigningEndpoint != "" {
		return nil // New validates the options with the keys of the signer
	}
	return errors.Join(c.Options.Validate()...)
}

// read reads the files of the options. Its error names the flag of the file.
func (c *Config) read() (kubeauthenticator.Config, error) {
	o := c.Options
	var errs []error
	check := func(flag, path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("--%s %q: %w", flag, path, err))
		}
	}
	if cert := o.ClientCert; cert != nil && cert.ClientCA != "" {
		_, err := certutil.NewPool(cert.ClientCA)
		check("client-ca-file", cert.ClientCA, err)
	}
	if proxy := o.RequestHeader; proxy != nil && proxy.ClientCAFile != "" {
		_, err := certutil.NewPool(proxy.ClientCAFile)
		check("requestheader-client-ca-file", proxy.ClientCAFile, err)
	}
	if accounts := o.ServiceAccounts; accounts != nil {
		for _, path := range accounts.KeyFiles {
			_, err := keyutil.PublicKeysFromFile(path)
			check("service-account-key-file", path, err)
		}
	}
	if len(errs) > 0 {
		return kubeauthenticator.Config{}, errors.Join(errs...)
	}
	ac, err := o.ToAuthenticationConfig()
	if err != nil && o.AuthenticationConfigFile != "" {
		err = fmt.Errorf("--authentication-config %q: %w", o.AuthenticationConfigFile, err)
	}
	return ac, err
}
