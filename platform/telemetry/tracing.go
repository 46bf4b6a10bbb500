package telemetry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.26.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	tracingapi "k8s.io/component-base/tracing/api/v1"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/version"
)

// Tracing configures the collector of spans, and which requests and events are traced. Tracing is off without an
// endpoint.
type Tracing struct {
	// ConfigFile has a TracingConfiguration, as in kube-apiserver.
	ConfigFile string
	// Endpoint is the host:port of an OTLP gRPC collector.
	Endpoint string
	// Ratio is the share of requests, and of events, that is traced: 0 to 1. A request of system:masters or
	// system:monitoring with a sampled traceparent is always traced.
	Ratio float64
	// CAFile is the CA of the collector. Empty: the connection uses no TLS.
	CAFile string
	// Dialer returns the dialer of the collector, or nil for a direct connection. It may be nil itself.
	Dialer func() (utilnet.DialFunc, error)
}

func (o *Tracing) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ConfigFile, "tracing-config-file", o.ConfigFile,
		"File with apiserver tracing configuration (TracingConfiguration). It overrides --tracing-endpoint and "+
			"--tracing-sampling-ratio.")
	fs.StringVar(&o.Endpoint, "tracing-endpoint", o.Endpoint,
		"host:port of an OTLP gRPC collector such as Jaeger's 4317. Empty: no traces.")
	fs.Float64Var(&o.Ratio, "tracing-sampling-ratio", o.Ratio,
		"The share of requests, and of events of untraced requests, that is traced: 0 to 1. With 0 only requests of "+
			"system:masters and system:monitoring with a sampled traceparent are.")
	fs.StringVar(&o.CAFile, "tracing-ca-file", o.CAFile,
		"The certificate authority of the collector. Empty: the connection uses no TLS.")
}

// tracer creates this process's spans. Only requests and events begin a trace, because background work has no root
// span.
type tracer struct {
	// requests samples every span, because Sampled has already chosen the requests.
	requests, events trace.TracerProvider
	ratio            float64
}

// disabled is the tracer of a process without tracing.
var disabled = &tracer{requests: noop.NewTracerProvider(), events: noop.NewTracerProvider()}

var current = disabled

// TracingEnabled reports if this process creates spans. The result does not change after Start has returned.
func TracingEnabled() bool { return current != disabled }

// RequestTracerProvider returns the provider of the spans of requests that Sampled chose.
func RequestTracerProvider() trace.TracerProvider { return current.requests }

// Sampled reports if a request should be traced. It chooses the configured share at random.
func Sampled() bool { return current.ratio > 0 && rand.Float64() < current.ratio }

// readConfig applies the configuration file. Its errors are kube-apiserver's
// (k8s.io/apiserver/pkg/server/options/tracing.go).
func (o *Tracing) readConfig() error {
	if o.ConfigFile == "" {
		return nil
	}
	data, err := os.ReadFile(o.ConfigFile)
	if err != nil {
		const text = "failed to read tracing config: unable to read tracing configuration from %q: %w"
		return fmt.Errorf(text, o.ConfigFile, err)
	}
	var c struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		tracingapi.TracingConfiguration
	}
	err = yaml.UnmarshalStrict(data, &c)
	versions := []string{
		"apiserver.config.k8s.io/v1",
		"apiserver.config.k8s.io/v1beta1",
		"apiserver.config.k8s.io/v1alpha1",
	}
	if err == nil && (c.Kind != "TracingConfiguration" || !slices.Contains(versions, c.APIVersion)) {
		err = fmt.Errorf("no kind %q is registered for version %q", c.Kind, c.APIVersion)
	}
	if err != nil {
		return fmt.Errorf("failed to read tracing config: unable to decode tracing configuration data: %w", err)
	}
	if errs := tracingapi.ValidateTracingConfiguration(&c.TracingConfiguration, nil, nil); len(errs) > 0 {
		return fmt.Errorf("failed to validate tracing configuration: %w", errs.ToAggregate())
	}
	o.Endpoint, o.Ratio = "localhost:4317", 0
	if c.Endpoint != nil {
		o.Endpoint = *c.Endpoint
	}
	if c.SamplingRatePerMillion != nil {
		o.Ratio = float64(*c.SamplingRatePerMillion) / 1e6
	}
	return nil
}

// flushTimeout bounds the export of the last spans when a process ends, because the collector may be away.
const flushTimeout = 5 * time.Second

// start connects to the collector. stop flushes spans.
func (o *Tracing) start(ctx context.Context, service string) (stop func(), err error) {
	if err := o.readConfig(); err != nil {
		return nil, fmt.Errorf("--tracing-config-file %q: %w", o.ConfigFile, err)
	}
	if o.Ratio < 0 || o.Ratio > 1 {
		return nil, fmt.Errorf("--tracing-sampling-ratio %v: want a number from 0 to 1", o.Ratio)
	}
	otel.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{},
		propagation.Baggage{}))
	if o.Endpoint == "" {
		return func() {}, nil
	}
	secure := otlptracegrpc.WithInsecure()
	if o.CAFile != "" {
		pool, err := pki.ReadCertPool("tracing-ca-file", o.CAFile)
		if err != nil {
			return nil, err
		}
		secure = otlptracegrpc.WithTLSCredentials(
			credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}),
		)
	}
	options := []otlptracegrpc.Option{
		otlptracegrpc.WithEndpoint(strings.TrimPrefix(o.Endpoint, "dns://")), secure,
	}
	if o.Dialer != nil {
		dial, err := o.Dialer()
		if err != nil {
			return nil, err
		}
		if dial != nil { // k8s.io/apiserver/pkg/server/options, TracingOptions.ApplyTo
			options = append(options, otlptracegrpc.WithDialOption(grpc.WithContextDialer(
				func(ctx context.Context, address string) (net.Conn, error) { return dial(ctx, "tcp", address) })))
		}
	}
	export, err := otlptracegrpc.New(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("--tracing-endpoint %q: %w", o.Endpoint, err)
	}
	host, _ := os.Hostname()
	batch := sdktrace.NewBatchSpanProcessor(export)
	provider := func(root sdktrace.Sampler) *sdktrace.TracerProvider {
		return sdktrace.NewTracerProvider(
			sdktrace.WithSpanProcessor(smallSpans{batch}),
			sdktrace.WithSampler(sdktrace.ParentBased(root)),
			sdktrace.WithResource(resource.NewSchemaless(semconv.ServiceName(service), semconv.ServiceInstanceID(host),
				semconv.ServiceVersion(version.Release()))),
		)
	}
	inner, events := provider(sdktrace.NeverSample()), provider(sdktrace.TraceIDRatioBased(o.Ratio))
	otel.SetTracerProvider(inner)
	current = &tracer{requests: provider(sdktrace.AlwaysSample()), events: events, ratio: o.Ratio}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
		defer cancel()
		_ = errors.Join(batch.Shutdown(ctx))
	}, nil
}
