package probe

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
)

// Flags are the flags of the command.
type Flags struct {
	inspect.Options
	Namespace, MetricsAddress   string
	Output                      inspect.Output
	Interval, Timeout, Duration time.Duration
	Once                        bool
	Limits                      Limits
}

// onceWrites is the number of writes of --once.
const onceWrites = 20

// AddFlags adds every flag to fs.
func (f *Flags) AddFlags(fs *pflag.FlagSet) {
	f.AddDataDirFlag(fs)
	fs.StringVar(&f.Kubeconfig, "kubeconfig", "",
		"The kubeconfig of the probe, whose user may create, update, watch and delete ConfigMaps in --namespace. "+
			"Empty: that of the data directory, or kubectl's if --data-dir is not set and no process runs there.")
	fs.StringVar(&f.Context, "context", "", "The context of the kubeconfig.")
	fs.StringVar(&f.Namespace, "namespace", "kube-system", "The namespace of the probe's ConfigMap.")
	fs.DurationVar(&f.Interval, "interval", time.Second, "The time between writes.")
	fs.DurationVar(&f.Timeout, "timeout", 10*time.Second, "How long a write or an event may take.")
	fs.DurationVar(&f.Duration, "duration", 0, "How long to probe, then print a summary. 0: until a signal.")
	fs.BoolVar(&f.Once, "once", false, "Write 20 times in 2 s, then print a summary.")
	fs.StringVar(&f.MetricsAddress, "metrics-bind-address", "",
		"host:port of /metrics, without authentication. Empty: none.")
	fs.DurationVar(&f.Limits.AgeP99, "max-event-age", time.Second,
		"The bound of the 99th percentile of the age of events, which decides the exit code.")
	fs.DurationVar(&f.Limits.WriteP99, "max-write-latency", time.Second,
		"The bound of the 99th percentile of the latency of writes, which decides the exit code.")
	f.Output.AddFlag(fs)
}

// Command probes the cluster, and returns an error if a bound is exceeded.
func Command(fs *pflag.FlagSet) func() error {
	f := &Flags{}
	f.AddFlags(fs)
	return func() error {
		ctx, cancel := lifecycle.SignalContext()
		defer cancel()
		return f.run(ctx, os.Stdout)
	}
}

// run probes and prints the summary.
func (f *Flags) run(ctx context.Context, w io.Writer) error {
	if err := f.Output.Validate(); err != nil {
		return err
	}
	if f.Interval <= 0 || f.Timeout <= 0 || f.Duration < 0 {
		return fmt.Errorf("--interval %s, --timeout %s, --duration %s: want more than 0, or a duration of 0 for no end",
			f.Interval, f.Timeout, f.Duration)
	}
	c, err := f.Config()
	if err != nil {
		return err
	}
	c.Timeout, c.QPS = 0, -1 // a watch has no timeout
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return err
	}
	if f.MetricsAddress != "" {
		l, err := net.Listen("tcp", f.MetricsAddress)
		if err != nil {
			return fmt.Errorf("--metrics-bind-address %q: %w", f.MetricsAddress, err)
		}
		// It lacks watershed_build_info, by which alerts find the namespaces of Watershed: the probe is a client.
		metrics := prometheus.NewRegistry()
		metrics.MustRegister(Metrics()...)
		handler := promhttp.HandlerFor(metrics, promhttp.HandlerOpts{})
		server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
		defer server.Close()
		go func() { _ = server.Serve(l) }()
	}
	if f.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.Duration)
		defer cancel()
	}
	p := &Probe{
		Client:    client,
		Namespace: f.Namespace,
		Name:      "watershed-probe-" + strings.ToLower(rand.Text()[:8]),
		Interval:  f.Interval,
		Timeout:   f.Timeout,
	}
	writes := 0
	if f.Once {
		p.Interval, writes = min(p.Interval, 100*time.Millisecond), onceWrites
	}
	result, err := p.Run(ctx, writes)
	if err != nil {
		return err
	}
	if err := writeResult(w, f.Output, result); err != nil {
		return err
	}
	return f.Limits.Breach(result)
}

func writeResult(w io.Writer, output inspect.Output, r Result) error {
	if output.IsJSON() {
		return json.NewEncoder(w).Encode(r)
	}
	_, err := fmt.Fprintf(w, "%d writes, %d failed, p50 %.1f ms, p99 %.1f ms\n"+
		"%d events, %d missing, %d out of order, age p50 %.1f ms, p99 %.1f ms, %d watches\n",
		r.Writes, r.FailedWrites, r.WriteP50*1e3, r.WriteP99*1e3,
		r.Events, r.Missing, r.OutOfOrder, r.AgeP50*1e3, r.AgeP99*1e3, r.Watches)
	return err
}
