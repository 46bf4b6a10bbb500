package server

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
)

// Config holds the settings of the server, under kube-apiserver's names.
type Config struct {
	BindAddress                string
	SecurePort                 int
	TLS                        TLSConfig
	ClientCAFile               string
	ServicesCAFile             string
	RequestHeaderCAFile        string
	MaxInFlight, MaxMutating   int
	UserLimits                 UserLimitsConfig
	RequestTimeout             time.Duration
	CORS                       []string
	HSTS                       []string
	GoawayChance               float64
	APIAudiences               []string
	HTTP2MaxStreams            uint32
	PermitPortSharing          bool
	ShutdownDelay              time.Duration
	WatchGracePeriod           time.Duration
	ShutdownSendRetryAfter     bool
	RequestHeaderUserHeaders   []string
	RequestHeaderUIDHeaders    []string
	RequestHeaderGroupHeaders  []string
	RequestHeaderExtraPrefixes []string
}

// AddFlags registers the flags of the HTTPS server and its filters, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.BindAddress, "bind-address", "0.0.0.0",
		"The IP address on which to listen for the --secure-port port.")
	fs.IntVar(&c.SecurePort, "secure-port", 6443,
		"The port on which to serve HTTPS with authentication and authorization.")
	fs.BoolVar(&c.PermitPortSharing, "permit-port-sharing", false,
		"If true, SO_REUSEPORT is used when binding the port, so that more than one gateway can bind the same "+
			"address and port. The gateway then binds the port once it can serve.")
	c.TLS.addFlags(fs)
	fs.StringVar(&c.ClientCAFile, "client-ca-file", "",
		"Any request presenting a client certificate signed by one of the authorities in this file is authenticated "+
			"with its common name.")
	fs.StringVar(&c.ServicesCAFile, "services-client-ca-file", "",
		"CA bundle for the client certificates of authn, authz, admission and registry. authn must have the same bundle.")
	fs.StringVar(&c.RequestHeaderCAFile, "requestheader-client-ca-file", "",
		"Root certificate bundle for front proxies' client certificates.")
	fs.IntVar(&c.MaxInFlight, "max-requests-inflight", 400,
		"This and --max-mutating-requests-inflight are summed to determine the cluster's total concurrency "+
			"limit (which must be positive) if --enable-priority-and-fairness is true. Otherwise, this flag limits "+
			"the maximum number of non-mutating requests in flight of a gateway, or a zero value disables the limit "+
			"completely.")
	fs.IntVar(&c.MaxMutating, "max-mutating-requests-inflight", 200,
		"This and --max-requests-inflight are summed to determine the cluster's total concurrency limit "+
			"(which must be positive) if --enable-priority-and-fairness is true. Otherwise, this flag limits the "+
			"maximum number of mutating requests in flight of a gateway, or a zero value disables the limit "+
			"completely.")
	c.UserLimits.addFlags(fs)
	fs.DurationVar(&c.RequestTimeout, "request-timeout", time.Minute,
		"The time after which a request times out. Watches and other long-running requests have no limit.")
	fs.StringSliceVar(&c.CORS, "cors-allowed-origins", nil,
		"List of allowed origins for CORS, comma separated regular expressions. Write each so that it matches the "+
			"whole hostname, as in '//example\\.com(:|$)'. An expression without '^' or '//', or without '$' or ':', is "+
			"rejected.")
	fs.StringSliceVar(&c.HSTS, "strict-transport-security-directives", nil,
		"List of directives for HSTS, comma separated. Example: 'max-age=31536000,includeSubDomains,preload'.")
	fs.Float64Var(&c.GoawayChance, "goaway-chance", 0,
		"To prevent HTTP/2 clients from getting stuck on a single gateway, randomly close a connection (GOAWAY). "+
			"The probability per request, from 0 to 0.02.")
	fs.StringSliceVar(&c.APIAudiences, "api-audiences", nil, "Identifiers of the API.")
	fs.Uint32Var(&c.HTTP2MaxStreams, "http2-max-streams-per-connection", 0,
		"The limit that the server gives to clients for the maximum number of streams in an HTTP/2 connection. 0: 100.")
	fs.DurationVar(&c.ShutdownDelay, "shutdown-delay-duration", 0,
		"The time after SIGTERM during which the gateway still serves and /readyz fails.")
	fs.DurationVar(&c.WatchGracePeriod, "shutdown-watch-termination-grace-period", 0,
		"The period after --shutdown-delay-duration over which watches are ended, so that their clients do not all "+
			"reconnect at once. 0: all end immediately.")
	fs.BoolVar(&c.ShutdownSendRetryAfter, "shutdown-send-retry-after", false,
		"If true, the gateway listens until all requests in flight have ended. It waits for watches until "+
			"--shutdown-watch-termination-grace-period is over, and for no other long-running requests. During this "+
			"window it rejects requests with status 429, Retry-After and Connection: close.")
	fs.StringSliceVar(&c.RequestHeaderUserHeaders, "requestheader-username-headers", nil,
		"Request headers to inspect for usernames.")
	fs.StringSliceVar(&c.RequestHeaderUIDHeaders, "requestheader-uid-headers", nil,
		"Request headers to inspect for UIDs.")
	fs.StringSliceVar(&c.RequestHeaderGroupHeaders, "requestheader-group-headers", nil,
		"Request headers to inspect for groups.")
	fs.StringSliceVar(&c.RequestHeaderExtraPrefixes, "requestheader-extra-headers-prefix", nil,
		"Request header prefixes to inspect.")
}

// Validate rejects the values that kube-apiserver rejects (k8s.io/apiserver/pkg/server/options,
// ServerRunOptions.Validate), and names the flag.
func (c *Config) Validate() error {
	errs := []error{
		config.AtLeast("request-timeout", c.RequestTimeout, 0),
		config.AtLeast("shutdown-delay-duration", c.ShutdownDelay, 0),
		config.AtLeast("shutdown-watch-termination-grace-period", c.WatchGracePeriod, 0),
	}
	if net.ParseIP(c.BindAddress) == nil {
		errs = append(errs, fmt.Errorf("--bind-address %q: not an IP address", c.BindAddress))
	}
	if c.SecurePort < 1 || c.SecurePort > 65535 {
		errs = append(errs, fmt.Errorf("--secure-port %d must be between 1 and 65535, inclusive. It cannot be turned "+
			"off with 0", c.SecurePort))
	}
	if !(c.GoawayChance >= 0 && c.GoawayChance <= 0.02) { // also false for NaN
		errs = append(errs, fmt.Errorf("--goaway-chance=%v: want 0 to 0.02; 0 closes no connection",
			c.GoawayChance))
	}
	for _, pattern := range c.CORS {
		if err := checkOrigin(pattern); err != nil {
			errs = append(errs, fmt.Errorf("--cors-allowed-origins %q: %w", pattern, err))
		}
	}
	for _, directive := range c.HSTS {
		age, found := strings.CutPrefix(directive, "max-age=")
		if directive != "includeSubDomains" && directive != "preload" && (!found || strings.Contains(age, "=")) {
			errs = append(errs, fmt.Errorf("--strict-transport-security-directives %q: must be max-age=SECONDS, "+
				"includeSubDomains or preload", directive))
		}
	}
	return errors.Join(append(errs, c.UserLimits.Validate())...)
}

// checkOrigin returns an error if a pattern of --cors-allowed-origins is not a regular expression, or has no marker of
// the hostname's start ('^', '//') or end ('$', ':'). As in upstream, it does not check the position of the markers, so
// https://example.com passes, and matches other hosts (CVE-2022-1996).
func checkOrigin(pattern string) error {
	var invalid *syntax.Error
	if _, err := regexp.Compile(pattern); errors.As(err, &invalid) {
		return fmt.Errorf("must be a regular expression: %s", invalid.Code)
	}
	pinsStart := strings.Contains(pattern, "^") || strings.Contains(pattern, "//")
	if !pinsStart || !strings.ContainsAny(pattern, "$:") {
		return errors.New("must match the whole hostname: start it with '^' or '//', and end it with '$' or '(:|$)'")
	}
	return nil
}

// FrontProxyHeaders returns the headers that may carry an identity, by name and by prefix. The gateway removes them
// from every request. Upstream's authentication filter also removes X-Remote-User and similar, even if no flag names
// them, because a server behind the gateway may trust them.
func (c *Config) FrontProxyHeaders() (names, prefixes []string) {
	names = slices.Concat(c.RequestHeaderUserHeaders, c.RequestHeaderUIDHeaders, c.RequestHeaderGroupHeaders)
	return names, c.RequestHeaderExtraPrefixes
}

// StopTimeout returns the longest time that the server takes to stop.
func (c *Config) StopTimeout() time.Duration {
	return c.ShutdownDelay + c.WatchGracePeriod + c.RequestTimeout + 5*time.Second
}
