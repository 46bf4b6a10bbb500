// Package audit writes the audit log: an event for each stage of a request. The filter
// (k8s.io/apiserver/pkg/endpoints/filters, WithAudit) and the backends are upstream's. Package audit adds the bound in
// bytes and a faster JSON line. It does not decide the content of a write's event: registry sends an AuditContext.
// Response objects come from the bytes that the client received.
//
// The recording functions run on the request's goroutine. A backend in batch mode owns its own goroutine from New until
// Auditor.Close.
package audit

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	pluginbuffered "k8s.io/apiserver/plugin/pkg/audit/buffered"
	pluginlog "k8s.io/apiserver/plugin/pkg/audit/log"
	plugintruncate "k8s.io/apiserver/plugin/pkg/audit/truncate"
	pluginwebhook "k8s.io/apiserver/plugin/pkg/audit/webhook"

	"watershed.dev/platform/config"
)

// Modes of a backend (k8s.io/apiserver/pkg/server/options/audit.go).
const (
	// modeBatch queues events. Requests do not wait, and events beyond the queue's bounds are dropped and counted.
	modeBatch = "batch"
	// modeBlocking makes requests wait until their events are written or have failed.
	modeBlocking = "blocking"
	// modeBlockingStrict also rejects a request if its RequestReceived event cannot be written.
	modeBlockingStrict = "blocking-strict"
)

var modes = []string{modeBatch, modeBlocking, modeBlockingStrict}

// Config is the audit policy and its backends, under kube-apiserver's names and with its defaults.
type Config struct {
	PolicyFile string
	Log        LogConfig
	Webhook    WebhookConfig
}

// LogConfig is the log file, with a line for each event.
type LogConfig struct {
	// Path is the path of the file. "-" is standard output, and empty is no file.
	Path string
	// MaxAge is in days, MaxSize in megabytes.
	MaxAge, MaxBackups, MaxSize int
	Format, Version             string
	Compress                    bool
	backendOptions
}

// WebhookConfig is the server that receives events.
type WebhookConfig struct {
	// ConfigFile is the path of a kubeconfig. Empty is no webhook.
	ConfigFile     string
	InitialBackoff time.Duration
	Version        string
	backendOptions
}

// backendOptions are the options of a backend.
type backendOptions struct {
	Mode  string
	Batch pluginbuffered.BatchConfig
	// BatchBytes bounds the bytes of the queued events and of the batches that are being sent.
	BatchBytes      int64
	TruncateEnabled bool
	Truncate        plugintruncate.Config
}

// Upstream's defaults.
const (
	bufferSize, batchSize      = 10000, 400
	batchWait                  = 30 * time.Second
	throttleQPS, throttleBurst = 10, 15
	// batchBytes is a bound of this gateway: 10,000 events with their objects are gigabytes (kubernetes 85489).
	batchBytes = 64 << 20
)

// AddFlags registers the flags --audit-*, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.PolicyFile, "audit-policy-file", "",
		"Path to the file that defines the audit policy configuration. The gateway reloads it when it changes.")
	l := &c.Log
	fs.StringVar(&l.Path, "audit-log-path", "",
		"If set, all requests coming to the apiserver will be logged to this file. '-' means standard out.")
	fs.IntVar(&l.MaxAge, "audit-log-maxage", 366,
		"The maximum number of days to retain old audit log files based on the timestamp encoded in their filename. "+
			"0 disables the limit.")
	fs.IntVar(&l.MaxBackups, "audit-log-maxbackup", 100,
		"The maximum number of old audit log files to retain. 0 disables the limit.")
	fs.IntVar(&l.MaxSize, "audit-log-maxsize", 100,
		"The maximum size in megabytes of the audit log file before it gets rotated. 0 disables rotation.")
	fs.StringVar(&l.Format, "audit-log-format", pluginlog.FormatJson,
		`Format of saved audits. "legacy" indicates 1-line text format for each event. "json" indicates structured `+
			"json format.")
	fs.StringVar(&l.Version, "audit-log-version", auditv1.SchemeGroupVersion.String(),
		"API group and version used for serializing audit events written to log.")
	fs.BoolVar(&l.Compress, "audit-log-compress", false, "If set, the rotated log files will be compressed using gzip.")
	l.addFlags(fs, pluginlog.PluginName, modeBlocking, pluginbuffered.BatchConfig{
		BufferSize:   bufferSize,
		MaxBatchSize: 1,
	})
	w := &c.Webhook
	fs.StringVar(&w.ConfigFile, "audit-webhook-config-file", "",
		"Path to a kubeconfig formatted file that defines the audit webhook configuration.")
	fs.DurationVar(&w.InitialBackoff, "audit-webhook-initial-backoff", pluginwebhook.DefaultInitialBackoffDelay,
		"The amount of time to wait before retrying the first failed request.")
	fs.DurationVar(&w.InitialBackoff, "audit-webhook-batch-initial-backoff", pluginwebhook.DefaultInitialBackoffDelay,
		"The amount of time to wait before retrying the first failed request.")
	_ = fs.MarkDeprecated("audit-webhook-batch-initial-backoff", "use --audit-webhook-initial-backoff instead.")
	fs.StringVar(&w.Version, "audit-webhook-version", auditv1.SchemeGroupVersion.String(),
		"API group and version used for serializing audit events written to webhook.")
	w.addFlags(fs, pluginwebhook.PluginName, modeBatch, pluginbuffered.BatchConfig{
		BufferSize:     bufferSize,
		MaxBatchSize:   batchSize,
		MaxBatchWait:   batchWait,
		ThrottleEnable: true,
		ThrottleQPS:    throttleQPS,
		ThrottleBurst:  throttleBurst,
		AsyncDelegate:  true,
	})
}

func (d *backendOptions) addFlags(fs *pflag.FlagSet, plugin, mode string, batch pluginbuffered.BatchConfig) {
	name := func(s string) string { return "audit-" + plugin + "-" + s }
	d.Batch = batch
	b := &d.Batch
	fs.StringVar(&d.Mode, name("mode"), mode,
		"Strategy for sending audit events. Blocking indicates sending events should block server responses. Batch "+
			"causes the backend to buffer and write events asynchronously. Known modes are "+
			strings.Join(modes, ",")+".")
	fs.IntVar(&b.BufferSize, name("batch-buffer-size"), b.BufferSize,
		"The size of the buffer to store events before batching and writing. Only used in batch mode.")
	fs.Int64Var(&d.BatchBytes, name("batch-buffer-bytes"), batchBytes,
		"The maximum bytes of events in the buffer or being sent. Above it, events lose their objects, then are "+
			"dropped and counted. Only used in batch mode.")
	fs.IntVar(&b.MaxBatchSize, name("batch-max-size"), b.MaxBatchSize,
		"The maximum size of a batch. Only used in batch mode.")
	fs.DurationVar(&b.MaxBatchWait, name("batch-max-wait"), b.MaxBatchWait,
		"The amount of time to wait before force writing the batch that hadn't reached the max size. Only used in "+
			"batch mode.")
	fs.BoolVar(&b.ThrottleEnable, name("batch-throttle-enable"), b.ThrottleEnable,
		"Whether batching throttling is enabled. Only used in batch mode.")
	fs.Float32Var(&b.ThrottleQPS, name("batch-throttle-qps"), b.ThrottleQPS,
		"Maximum average number of batches per second. Only used in batch mode.")
	fs.IntVar(&b.ThrottleBurst, name("batch-throttle-burst"), b.ThrottleBurst,
		"Maximum number of requests sent at the same moment if ThrottleQPS was not utilized before. Only "+
			"used in batch mode.")
	fs.BoolVar(&d.TruncateEnabled, name("truncate-enabled"), false, "Whether event and batch truncating is enabled.")
	fs.Int64Var(&d.Truncate.MaxBatchSize, name("truncate-max-batch-size"), 10<<20,
		"Maximum size of the batch sent to the underlying backend. Actual serialized size can be several hundreds of "+
			"bytes greater. If a batch exceeds this limit, it is split into several batches of smaller size.")
	fs.Int64Var(&d.Truncate.MaxEventSize, name("truncate-max-event-size"), 100<<10,
		"Maximum size of the audit event sent to the underlying backend. If the size of an event is greater than this "+
			"number, first request and response are removed, and if this doesn't reduce the size enough, event is "+
			"discarded.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	if l := &c.Log; l.Path != "" {
		if err := l.validate(pluginlog.PluginName, l.Version); err != nil {
			return err
		}
		if !slices.Contains(pluginlog.AllowedFormats, l.Format) {
			return fmt.Errorf("--audit-log-format %q: must be one of %s", l.Format,
				strings.Join(pluginlog.AllowedFormats, ", "))
		}
		if err := errors.Join(
			config.AtLeast("audit-log-maxage", l.MaxAge, 0),
			config.AtLeast("audit-log-maxbackup", l.MaxBackups, 0),
			config.AtLeast("audit-log-maxsize", l.MaxSize, 0),
		); err != nil {
			return err
		}
	}
	if w := &c.Webhook; w.ConfigFile != "" {
		return w.validate(pluginwebhook.PluginName, w.Version)
	}
	return nil
}

func (d *backendOptions) validate(plugin, version string) error {
	wrong := func(flag string, value any, why string) error {
		return fmt.Errorf("--audit-%s-%s %v: %s", plugin, flag, value, why)
	}
	const positive = "must be a positive number"
	switch b := d.Batch; {
	case !slices.Contains(modes, d.Mode):
		return wrong("mode", fmt.Sprintf("%q", d.Mode), "must be one of "+strings.Join(modes, ", "))
	case d.Mode != modeBatch:
	case b.BufferSize <= 0:
		return wrong("batch-buffer-size", b.BufferSize, positive)
	case d.BatchBytes <= 0:
		return wrong("batch-buffer-bytes", d.BatchBytes, positive)
	case b.MaxBatchSize <= 0:
		return wrong("batch-max-size", b.MaxBatchSize, positive)
	case b.ThrottleEnable && b.ThrottleQPS <= 0:
		return wrong("batch-throttle-qps", b.ThrottleQPS, positive)
	case b.ThrottleEnable && b.ThrottleBurst <= 0:
		return wrong("batch-throttle-burst", b.ThrottleBurst, positive)
	}
	if d.Truncate.MaxEventSize <= 0 {
		return wrong("truncate-max-event-size", d.Truncate.MaxEventSize, positive)
	}
	if d.Truncate.MaxBatchSize < d.Truncate.MaxEventSize {
		return wrong("truncate-max-batch-size", d.Truncate.MaxBatchSize,
			fmt.Sprintf("must be at least --audit-%s-truncate-max-event-size, %d", plugin, d.Truncate.MaxEventSize))
	}
	if gv, err := schema.ParseGroupVersion(version); err != nil || gv != auditv1.SchemeGroupVersion {
		return wrong("version", fmt.Sprintf("%q", version), "must be "+auditv1.SchemeGroupVersion.String())
	}
	return nil
}
