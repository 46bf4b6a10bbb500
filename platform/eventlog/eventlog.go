// Package eventlog is the ordered log of etcd events in NATS JetStream: its subjects, its messages, its readers and
// writer. platform/watchcache/core decides their order: this package performs its reads and appends.
//
// A message of the stream holds a logv1.Event, or a logv1.Batch of events of a resource. Its ID is the position of its
// last event. Each publish expects the ID of the previous message (Nats-Expected-Last-Msg-Id) and its sequence.
// JetStream therefore rejects the messages of a deposed publisher, and the log cannot fork or have a gap.
//
// The package does not read etcd and elects no publisher; the registry does. Read and Replay run in the caller's
// goroutine. A Writer records acknowledgements in the goroutine of its subscription, and timeouts in those of its
// timers.
package eventlog

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/version"

	"watershed.dev/platform/config"
	"watershed.dev/platform/rpc"
)

const (
	// StreamName is the name of the JetStream stream.
	StreamName  = "watershed"
	eventPrefix = "watershed.event."
	// storedPrefix is the prefix of the subjects to which NATS republishes each stored message (RePublish).
	storedPrefix = "watershed.stored."
	// progressSubject carries progress messages and resets, in order with the events.
	progressSubject = "watershed.progress"
	// ProgressRequestSubject is the subject on which a reader requests progress from the publisher, if it waits for a
	// revision.
	ProgressRequestSubject = "watershed.progress.request"
	// endRequestSubject is the subject on which the publisher requests the ends of the log that registries have read.
	endRequestSubject = "watershed.end.request"
)

// inboxPrefix returns the inbox prefix of a client. Only that client may subscribe to it.
func inboxPrefix(client string) string { return "_INBOX_" + client }

// minServerVersion is the oldest supported NATS server. On restart, an older server loses the id of a last message that
// is older than the duplicate window (nats-server pull request 8564). It then rejects every publish that expects that
// id.
const minServerVersion = "2.15.2"

// checkServer rejects a server that is too old. A client that is not connected yet passes; Stream checks again.
func checkServer(nc *nats.Conn) error {
	server := nc.ConnectedServerVersion()
	if server != "" && tooOld(server) {
		return fmt.Errorf("NATS server %s at %s is too old: use %s or newer; older servers lose the last message's "+
			"id when they restart, and reject all later messages", server, nc.ConnectedUrlRedacted(), minServerVersion)
	}
	return nil
}

func tooOld(server string) bool {
	v, err := version.ParseSemantic(server)
	return err != nil || v.LessThan(version.MustParseSemantic(minServerVersion))
}

// Subject returns the subject of a storage resource's events.
func Subject(storedAs string) string { return eventPrefix + storedAs }

// Options configures the connection to NATS and the stream.
type Options struct {
	URL string
	// Name is the name of the log in etcd. Registries that share NATS servers have the same name.
	Name string
	// Owner identifies the control plane and the log. A stream with another owner is refused. Empty: it is not checked.
	Owner string
	// ID identifies the stream and its subjects.
	ID        LogID
	Storage   string
	Replicas  int
	Retention time.Duration
	MaxBytes  int64
	// Conn, if set, replaces URL: it is the in-process connection of the embedded server.
	Conn nats.InProcessConnProvider
}

// AddFlags registers the flags --nats-url and --log-*, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.URL, "nats-url", o.URL,
		"NATS servers, comma separated (tls://host:4222). Mutual TLS with the --rpc-* identity.")
	_ = fs.SetAnnotation("nats-url", "classified", []string{"true"}) // /flagz hides it: a URL may hold a password
	fs.StringVar(&o.Name, "log-name", "default",
		"The name of the event log in etcd. Registries with the same NATS servers share a name; others have another.")
	fs.StringVar(&o.Storage, "log-storage", "file",
		`Storage of the event log in JetStream: "file" or "memory". A change fills the log again from etcd. `+
			"All registries need the same value.")
	fs.IntVar(&o.Replicas, "log-replicas", 1, "JetStream replicas of the event log: 1, 3 or 5.")
	fs.DurationVar(&o.Retention, "log-retention", 10*time.Minute,
		"Age limit of events in the event log, which is also how far back a watch can resume.")
	fs.Int64Var(&o.MaxBytes, "log-max-bytes", 1<<30, "Size limit of the event log in bytes.")
}

// Validate returns an error that names each flag with a value that JetStream cannot use.
func (o *Options) Validate() error {
	var errs []error
	for server := range strings.SplitSeq(o.URL, ",") {
		u, err := url.Parse(server)
		if o.URL != "" && (err != nil || u.Host == "") {
			errs = append(errs, errors.New("--nats-url: want nats://host:port or tls://host:port, comma separated"))
		}
	}
	if o.Storage != "file" && o.Storage != "memory" {
		errs = append(errs, fmt.Errorf(`--log-storage=%s: want "file" or "memory"`, o.Storage))
	}
	if len(validation.IsDNS1123Label(o.Name)) > 0 {
		errs = append(errs, fmt.Errorf("--log-name=%s: want at most 63 lower case letters, digits and hyphens", o.Name))
	}
	if o.Replicas != 1 && o.Replicas != 3 && o.Replicas != 5 {
		errs = append(errs, fmt.Errorf("--log-replicas=%d: want 1, 3 or 5", o.Replicas))
	}
	return errors.Join(append(errs,
		config.AtLeast("log-retention", o.Retention, time.Second),
		config.AtLeast("log-max-bytes", o.MaxBytes, 1<<20))...)
}

// Connect connects to NATS and reconnects until the connection is closed.
func (o *Options) Connect(name string, id rpc.TLS) (*nats.Conn, error) {
	opts := []nats.Option{nats.Name(name), nats.CustomInboxPrefix(inboxPrefix(name)), nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond), nats.ReconnectBufSize(-1),
		nats.RetryOnFailedConnect(true),
		nats.IgnoreAuthErrorAbort(),        // otherwise two refusals close the connection
		nats.SyncQueueLen(pendingMessages), // the default is a channel of 512 KB for each subscription
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if !mayNotRequestReports(err) {
				slog.Warn("NATS", "error", err)
			}
		})}
	opts = append(opts, leaveDeadPeers()...)
	servers := o.URL
	if o.Conn != nil {
		opts = append(opts, nats.InProcessServer(o.Conn))
	} else {
		if servers == "" {
			return nil, errors.New("--nats-url is required")
		}
		conf, err := id.ClientConfig("nats")
		if err != nil {
			return nil, err
		}
		opts = append(opts, nats.Secure(conf))
	}
	nc, err := nats.Connect(servers, opts...)
	if err != nil {
		return nil, fmt.Errorf("--nats-url %q: %w", servers, err)
	}
	if err := checkServer(nc); err != nil {
		nc.Close()
		return nil, fmt.Errorf("--nats-url %q: %w", servers, err)
	}
	return nc, nil
}
