package registry

import (
	"errors"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/egress"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/features"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// Config is the registry's configuration.
type Config struct {
	Storage     storage.Options
	APIs        installer.Options
	Log         eventlog.Options
	Controllers controllers.Options
	Egress      egress.Config
	Kubeconfig  string
	// LogEndDir is the directory of the files that keep the end of each event log. Empty: none is kept.
	LogEndDir string

	ServiceAccountSigningKeyFile string
	// ServiceAccountSigningEndpoint is the socket of an external signer. Empty: the key file signs.
	ServiceAccountSigningEndpoint string
	ServiceAccountIssuers         []string
	APIAudiences                  []string
	MaxTokenExpiration            time.Duration
	ExtendTokenExpiration         bool
}

// NewConfig returns a configuration with the defaults.
func NewConfig() *Config { return &Config{APIs: installer.NewOptions()} }

// AddFlags adds a flag per setting to fs, with kube-apiserver's name if it has the setting.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Storage.AddFlags(fs)
	c.APIs.AddFlags(fs)
	c.Log.AddFlags(fs)
	c.Controllers.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.StringVar(&c.LogEndDir, "log-end-dir", "",
		"The directory that keeps the end of the event log that this registry has read. Watches then continue if NATS "+
			"loses the log and all registries restart within a minute. Each registry needs its own, on a tmpfs. A directory "+
			"that cannot be used stops the start. Empty: none.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"Kubeconfig of the gateway, for conversion webhooks at the API's own Service, kubernetes.default. It is unused "+
			"if the gateway is in this process.")
	fs.StringVar(&c.ServiceAccountSigningKeyFile, "service-account-signing-key-file", "",
		"Path to the file that contains the current private key of the service account token issuer.")
	fs.StringVar(&c.ServiceAccountSigningEndpoint, "service-account-signing-endpoint", "",
		"Path to the socket where an external JWT signer is listening. This flag is mutually exclusive with "+
			"--service-account-signing-key-file and --service-account-key-file.")
	fs.StringArrayVar(&c.ServiceAccountIssuers, "service-account-issuer", nil,
		"Identifier of the service account token issuer; the first one issues.")
	fs.StringSliceVar(&c.APIAudiences, "api-audiences", nil,
		"Identifiers of the API. The default is the service account issuer.")
	fs.DurationVar(&c.MaxTokenExpiration, "service-account-max-token-expiration", 0,
		"The maximum validity duration of a token created by the service account token issuer.")
	fs.BoolVar(&c.ExtendTokenExpiration, "service-account-extend-token-expiration", true,
		"Turns on projected service account expiration extension during token generation.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	_, _, rangeErr := c.APIs.ServiceIPRanges()
	return errors.Join(c.Storage.Validate(), rangeErr, c.Log.Validate(), c.Controllers.Validate())
}
