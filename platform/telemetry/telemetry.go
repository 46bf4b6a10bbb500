// Package telemetry sets up a process's logs, metrics and traces. It logs the steps of slow requests
// (Steps). It bounds the length of log lines and of spans' values. It does not define metrics.
//
// ServeDebug owns the goroutines of its servers. The OpenTelemetry SDK owns the goroutines that export spans.
package telemetry

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"golang.org/x/net/netutil"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"

	"watershed.dev/platform/socket"
)

// Options are the flags that every service has.
type Options struct {
	Verbosity     int
	VModule       string
	LogFormat     string
	Tracing       Tracing
	DebugAddress  string
	HealthAddress string
	// Metrics selects Kubernetes' metrics and their label values.
	Metrics metrics.Options
}

// AddFlags registers the flags of logs, traces and the debug pages, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.AddLogFlags(fs)
	o.Metrics.AddFlags(fs)
	o.Tracing.addFlags(fs)
	fs.StringVar(&o.DebugAddress, "debug-address", o.DebugAddress,
		"host:port of this process's own /metrics, /healthz and /debug/pprof, without authentication: loopback or "+
			"an inner network only; or the path of a socket. Empty: none.")
	fs.StringVar(
		&o.HealthAddress,
		"health-address",
		o.HealthAddress,
		"host:port of /readyz (for readiness probes), /healthz (whether it serves), /livez (whether it runs) and "+
			"/metrics, without authentication. Empty: none.",
	)
}

// AddLogFlags registers the flags of logs, with their defaults.
func (o *Options) AddLogFlags(fs *pflag.FlagSet) {
	fs.IntVarP(&o.Verbosity, "v", "v", o.Verbosity,
		"Log verbosity: 0 is for operators, 4 is for debugging.")
	fs.StringVar(&o.VModule, "vmodule", o.VModule, "Comma-separated pattern=N settings for file-filtered verbosity.")
	fs.StringVar(&o.LogFormat, "logging-format", textFormat, `"text" or "json".`)
}

// StartLogs sets up logging to w for the named service.
func (o *Options) StartLogs(service string, w io.Writer) error {
	modules, err := parseModules(o.VModule)
	if err != nil {
		return err
	}
	verbosity.Store(int64(o.Verbosity))
	moduleVerbosity.Store(int64(modules.maxVerbosity()))
	h, err := newHandler(w, o.LogFormat, level{})
	if err != nil {
		return err
	}
	if len(modules) > 0 {
		h = &moduleHandler{Handler: h, modules: modules}
	}
	slog.SetDefault(slog.New(h).With("service", service))
	klogFlags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	_ = klogFlags.Set("v", strconv.Itoa(o.Verbosity))
	if err := klogFlags.Set("vmodule", o.VModule); err != nil {
		return fmt.Errorf("--vmodule %q: %w", o.VModule, err)
	}
	klog.SetSlogLogger(slog.Default().With("logger", "kubernetes"))
	utilruntime.ErrorHandlers[0] = unhandled
	return nil
}

// Start sets up logging to w, metrics and tracing, for the named service. stop flushes spans.
func (o *Options) Start(ctx context.Context, service string, w io.Writer) (stop func(), err error) {
	if err := o.StartLogs(service, w); err != nil {
		return nil, err
	}
	if errs := o.Metrics.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if m := &o.Metrics; m.ShowHiddenMetricsForVersion != "" || m.AllowListMappingManifest != "" ||
		len(m.DisabledMetrics)+len(m.AllowListMapping) > 0 {
		m.Apply() // logs an error without an allow list
	}
	return o.Tracing.start(ctx, service)
}

// Profiles adds the process's profiles to mux, below /debug/pprof/.
func Profiles(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
}

// healthPages are the service's pages that the health address serves too.
var healthPages = []string{"/healthz", "/readyz"}

// Every client that reaches the health address may use it, so its resources are bounded. A connection serves one
// request. The numbers of connections and of concurrent scrapes are limited.
const (
	maxPageConnections = 512
	maxScrapes         = 2
	pageTimeout        = 30 * time.Second
	maxPageHeaderBytes = 8 << 10
)

// ServeDebug serves the process's pages until ctx is done: all pages at the debug address, health and metrics at the
// health address. extra adds pages.
func (o *Options) ServeDebug(ctx context.Context, gatherer prometheus.Gatherer, extra map[string]http.Handler) error {
	health, debug := http.NewServeMux(), http.NewServeMux()
	for _, mux := range []*http.ServeMux{health, debug} {
		mux.Handle("/metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes}))
		mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
		for _, path := range healthPages {
			if h := extra[path]; h != nil {
				mux.Handle(path, h)
			}
		}
	}
	Profiles(debug)
	debug.HandleFunc("PUT /debug/flags/v", putVerbosity)
	for path, h := range extra {
		if !slices.Contains(healthPages, path) {
			debug.Handle(path, h)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		failed <- servePages(ctx, "health-address", o.HealthAddress, health)
		cancel()
	}()
	err := servePages(ctx, "debug-address", o.DebugAddress, debug)
	cancel()
	return errors.Join(err, <-failed)
}

// servePages serves pages at the address of a flag until ctx is done. It serves nothing at an empty address.
func servePages(ctx context.Context, flag, address string, mux *http.ServeMux) error {
	if address == "" {
		<-ctx.Done()
		return nil
	}
	listen := func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	if strings.HasPrefix(address, "/") {
		listen = socket.Listen
	}
	l, err := listen(address)
	if err != nil {
		return fmt.Errorf("--%s %q: %w", flag, address, err)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	if flag == "health-address" {
		l = netutil.LimitListener(l, maxPageConnections)
		srv.ReadHeaderTimeout, srv.ReadTimeout, srv.WriteTimeout = time.Second, pageTimeout, pageTimeout
		srv.MaxHeaderBytes = maxPageHeaderBytes
		srv.SetKeepAlivesEnabled(false)
	}
	go func() { <-ctx.Done(); srv.Close() }()
	if err := srv.Serve(l); err != http.ErrServerClosed {
		return err
	}
	return nil
}
