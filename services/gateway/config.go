package gateway

import (
	"errors"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	_ "k8s.io/kubernetes/pkg/features" // --feature-gates knows every gate

	"watershed.dev/platform/config"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/features"
	"watershed.dev/services/gateway/aggregation"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/flowcontrol"
	"watershed.dev/services/gateway/proxy"
	"watershed.dev/services/gateway/server"
	"watershed.dev/services/gateway/watch"
)

// Config is the configuration of a gateway.
type Config struct {
	Server            server.Config
	AdvertiseAddress  string
	ExternalHostname  string
	MinRequestTimeout int
	Watch             watch.Config
	Profiling         bool
	Console           bool
	// ContentionProfiling records all blocking events, for the profile "block".
	ContentionProfiling bool
	LivezGracePeriod    time.Duration
	EtcdHealthTimeout   time.Duration
	EtcdReadyTimeout    time.Duration
	Aggregation         aggregation.Config
	Proxy               proxy.Config
	Audit               audit.Config
	FlowControl         flowcontrol.Config
	Egress              egress.Config
}

// AddFlags registers every flag of the gateway, with its default.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs)
	c.Server.AddFlags(fs)
	c.Watch.AddFlags(fs)
	c.Aggregation.AddFlags(fs)
	c.Proxy.AddFlags(fs)
	c.Audit.AddFlags(fs)
	c.FlowControl.AddFlags(fs)
	c.Egress.AddFlags(fs)
	fs.BoolVar(&c.Profiling, "profiling", true, "Enable profiling via web interface host:port/debug/pprof/.")
	fs.BoolVar(&c.Console, "console", true,
		"Enable the console for operators via web interface host:port/watershed, for users that may get the path.")
	fs.BoolVar(&c.ContentionProfiling, "contention-profiling", false,
		"Enable block profiling of the gateway's process, if profiling is enabled.")
	fs.DurationVar(&c.LivezGracePeriod, "livez-grace-period", 0,
		"The time from the start of the gateway during which /livez assumes that unfinished start hooks will succeed.")
	fs.DurationVar(&c.EtcdHealthTimeout, "etcd-healthcheck-timeout", 2*time.Second,
		"The timeout to use when checking etcd health.")
	fs.DurationVar(&c.EtcdReadyTimeout, "etcd-readycheck-timeout", 2*time.Second,
		"The timeout to use when checking etcd readiness.")
	fs.StringVar(&c.AdvertiseAddress, "advertise-address", "",
		"The IP address on which to advertise the API to members of the cluster: an endpoint of the kubernetes "+
			"Service. Empty: the host's default interface. none: no endpoint.")
	fs.StringVar(&c.ExternalHostname, "external-hostname", "",
		"The hostname to use when generating externalized URLs for this master (e.g. Swagger API Docs or OpenID "+
			"Discovery).")
	fs.IntVar(&c.MinRequestTimeout, "min-request-timeout", 1800,
		"The minimum number of seconds a watch without timeoutSeconds stays open; each gets a random value above it.")
}

// notAdvertised is registry's --advertise-address without a Service to manage. In a shared process, both read the flag.
const notAdvertised = "none"

// externalAddress returns the host:port at which clients reach the gateway. The rules are from Config.Complete
// (k8s.io/apiserver/pkg/server) and Complete (k8s.io/kubernetes/pkg/controlplane/apiserver/options).
func (c *Config) externalAddress() string {
	host := c.ExternalHostname
	if host == "" && c.AdvertiseAddress != notAdvertised {
		host = c.AdvertiseAddress
	}
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	if host == "" {
		host = c.interfaceAddress()
	}
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			host = "localhost"
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(c.Server.SecurePort))
}

// advertiseAddress returns the IP address of --advertise-address. If the flag is not set, it is the address of the
// default interface, as in kube-apiserver. It is empty if there is none.
func (c *Config) advertiseAddress() string {
	ip := net.ParseIP(c.AdvertiseAddress)
	switch {
	case ip != nil && !ip.IsUnspecified():
		return ip.String()
	case ip != nil || c.AdvertiseAddress == "":
		return c.interfaceAddress()
	}
	return ""
}

// interfaceAddress returns --bind-address, or the address of the default interface if the flag names no interface or
// loopback. It is empty if the host has no other address.
func (c *Config) interfaceAddress() string {
	ip, err := utilnet.ResolveBindAddress(net.ParseIP(c.Server.BindAddress))
	if err != nil {
		return ""
	}
	return ip.String()
}

// NewConfig returns a configuration without values. AddFlags sets the defaults.
func NewConfig() *Config { return &Config{} }

// Validate follows k8s.io/apiserver/pkg/server/options/server_run_options.go.
func (c *Config) Validate() error {
	reads, writes := c.Server.MaxInFlight, c.Server.MaxMutating
	errs := []error{
		config.AtLeast("max-requests-inflight", reads, 0),
		config.AtLeast("max-mutating-requests-inflight", writes, 0),
		config.AtLeast("min-request-timeout", c.MinRequestTimeout, 0),
		config.AtLeast("livez-grace-period", c.LivezGracePeriod, 0),
	}
	if c.FlowControl.Enabled && reads == 0 && writes == 0 {
		errs = append(errs, errors.New("--max-requests-inflight 0 and --max-mutating-requests-inflight 0: their sum "+
			"must be positive with --enable-priority-and-fairness"))
	}
	return errors.Join(append(errs, c.Server.Validate(), c.Watch.Validate())...)
}

// stopTimeout returns the longest time in which the gateway stops.
func (c *Config) stopTimeout() time.Duration { return c.Server.StopTimeout() + audit.FlushTimeout }
