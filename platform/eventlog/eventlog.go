// Package eventlog is the ordered log of etcd events in NATS JetStream: its names, its order and how to read it.
//
// Every message holds one logv1.Event. A message's id says where in etcd's history it stands, and each publish expects
// the id before it, so the log can neither fork nor gap: a deposed publisher's message is refused.
package eventlog

import (
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/version"

	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// StreamName is the JetStream stream.
	StreamName  = "watershed"
	eventPrefix = "watershed.event."
	// storedPrefix is the prefix of the subjects on which NATS publishes each message again once the stream holds it.
	storedPrefix = "watershed.stored."
	// ProgressSubject carries progress and resets, in order with the events.
	ProgressSubject = "watershed.progress"
	// ProgressRequestSubject is where a reader that waits for a revision asks the publisher to say how far it is.
	ProgressRequestSubject = "watershed.progress.request"
)

// Inbox is where a client of a name gets answers: it alone may read them.
func Inbox(client string) string { return "_INBOX_" + client }

// minServerVersion is the oldest NATS server that the log can be kept by. Older ones lose, when they are restarted, the id
// of the last message where that is older than the duplicate window (nats-server pull request 8564), and then refuse
// every publish that names it.
const minServerVersion = "2.15.2"

// checkServer refuses a server that is too old. One that is not connected is checked when it is used.
func checkServer(nc *nats.Conn) error {
	server := nc.ConnectedServerVersion()
	if server != "" && tooOld(server) {
		return fmt.Errorf("NATS server %s at %s is too old: use %s or newer; older ones forget the last message's "+
			"id when they restart, and refuse every publish after it", server, nc.ConnectedUrlRedacted(), minServerVersion)
	}
	return nil
}

func tooOld(server string) bool {
	v, err := version.ParseSemantic(server)
	return err != nil || v.LessThan(version.MustParseSemantic(minServerVersion))
}

// Subject is where a stored resource's events are.
func Subject(storedAs string) string { return eventPrefix + storedAs }

// Options say where NATS is and how the log is kept.
type Options struct {
	URL       string
	Storage   string
	Replicas  int
	Retention time.Duration
	MaxBytes  int64
	// Conn, if set, is used in place of URL: the embedded server's in-process connection.
	Conn nats.InProcessConnProvider
}

// AddFlags registers the flags --nats-url and --log-*, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.URL, "nats-url", o.URL,
		"NATS servers, comma separated (tls://host:4222). Mutual TLS with the --rpc-* identity.")
	fs.StringVar(&o.Storage, "log-storage", "file", `Where JetStream keeps the event log: "file" or "memory".`)
	fs.IntVar(&o.Replicas, "log-replicas", 1, "JetStream replicas of the event log: 1, 3 or 5.")
	fs.DurationVar(&o.Retention, "log-retention", 10*time.Minute,
		"How long the event log keeps events, which is how far back a watch can resume.")
	fs.Int64Var(&o.MaxBytes, "log-max-bytes", 1<<30, "The event log's size bound in bytes.")
}

// Connect connects to NATS and reconnects for ever. Close the connection to end it.
func (o *Options) Connect(name string, id rpc.TLS) (*nats.Conn, error) {
	opts := []nats.Option{nats.Name(name), nats.CustomInboxPrefix(Inbox(name)), nats.MaxReconnects(-1),
		nats.ReconnectWait(100 * time.Millisecond), nats.ReconnectBufSize(-1),
		nats.RetryOnFailedConnect(true), nats.PingInterval(5 * time.Second), nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { slog.Warn("NATS", "error", err) })}
	url := o.URL
	if o.Conn != nil {
		opts = append(opts, nats.InProcessServer(o.Conn))
	} else {
		if url == "" {
			return nil, errors.New("--nats-url is required")
		}
		conf, err := id.ClientConfig("nats")
		if err != nil {
			return nil, err
		}
		opts = append(opts, nats.Secure(conf))
	}
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		return nil, fmt.Errorf("--nats-url %q: %w", url, err)
	}
	if err := checkServer(nc); err != nil {
		nc.Close()
		return nil, fmt.Errorf("--nats-url %q: %w", url, err)
	}
	return nc, nil
}

// JetStream returns the context in which registry publishes: at most 512 messages await their acknowledgement, each
// for at most 5 s.
func JetStream(nc *nats.Conn) (jetstream.JetStream, error) {
	return jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(512),
		jetstream.WithPublishAsyncTimeout(5*time.Second))
}

// ID is where an event stands: a revision, an index in its transaction, and whether it is an event at all.
type ID struct {
	Revision int64
	Index    int32
	// Progress is true for progress and for a reset of everything, which say something of all that is up to Revision. A
	// reset of one resource has a place in its transaction, as an event has.
	Progress bool
	// nonce keeps apart what different publishers, or different histories of etcd, would call the same.
	nonce string
}

// IDOf is e's id as the publisher with the nonce gives it.
func IDOf(e *logv1.Event, nonce string) ID {
	progress := e.Type == logv1.Type_TYPE_UNSPECIFIED || e.Type == logv1.Type_TYPE_RESET && e.StorageResource == ""
	return ID{e.Revision, e.Index, progress, nonce}
}

func (id ID) String() string {
	prefix := ""
	if id.Progress {
		prefix = "m"
	}
	return fmt.Sprintf("%s%d.%d.%s", prefix, id.Revision, id.Index, id.nonce)
}

// ParseID is String's inverse.
func ParseID(s string) (ID, error) {
	rest, progress := strings.CutPrefix(s, "m")
	parts := strings.SplitN(rest, ".", 3)
	if len(parts) != 3 {
		return ID{}, fmt.Errorf("not an event id: %q", s)
	}
	r, err := strconv.ParseInt(parts[0], 10, 64)
	i, ierr := strconv.ParseInt(parts[1], 10, 32)
	if err != nil || ierr != nil {
		return ID{}, fmt.Errorf("not an event id: %q", s)
	}
	return ID{
		Revision: r,
		Index:    int32(i),
		Progress: progress,
		nonce:    parts[2],
	}, nil
}

const (
	// encodingHeader names how a message's data is compressed; without it, it is not.
	encodingHeader = "Content-Encoding"
	s2Encoding     = "s2"
	// compressThreshold is from how many bytes on a message is compressed: an object's JSON may be six times what it was
	// written as, and the log's room is everybody's.
	compressThreshold = 64 << 10
	// maxEventBytes bounds what a message may unpack to: an object of 3 MB, twice, each as protobuf and as JSON that
	// escapes every byte, and some room.
	maxEventBytes = 64 << 20
)

// Message wraps e for publishing. An error is e's own: nothing of NATS has been asked yet.
func Message(e *logv1.Event) (*nats.Msg, error) {
	data, err := proto.Marshal(e)
	if err != nil {
		return nil, err
	}
	if len(data) > maxEventBytes {
		return nil, fmt.Errorf("it takes %d bytes, more than the %d of a message", len(data), maxEventBytes)
	}
	subject := ProgressSubject
	if e.StorageResource != "" {
		subject = Subject(e.StorageResource)
	}
	m := &nats.Msg{Subject: subject, Data: data, Header: nats.Header{}}
	if compressed, ok := compress(data); ok {
		m.Data = compressed
		m.Header.Set(encodingHeader, s2Encoding)
	}
	return m, nil
}

// compress compresses what is large, where that makes it smaller.
func compress(data []byte) ([]byte, bool) {
	if len(data) <= compressThreshold {
		return nil, false
	}
	compressed := s2.Encode(nil, data)
	return compressed, len(compressed) < len(data)
}

// decompress is pack's inverse, within what a message may unpack to.
func decompress(data []byte) ([]byte, error) {
	n, err := s2.DecodedLen(data)
	if err != nil {
		return nil, err
	}
	if n > maxEventBytes {
		return nil, fmt.Errorf("it unpacks to %d bytes, more than the %d of a message", n, maxEventBytes)
	}
	return s2.Decode(nil, data)
}

// Event is Message's inverse, of data as a message with the header holds it.
func Event(header nats.Header, data []byte) (*logv1.Event, error) {
	return decode(header.Get(encodingHeader), data)
}

func decode(encoding string, data []byte) (*logv1.Event, error) {
	switch encoding {
	case "":
	case s2Encoding:
		var err error
		if data, err = decompress(data); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("unknown %s %q", encodingHeader, encoding)
	}
	e := &logv1.Event{}
	return e, proto.Unmarshal(data, e)
}
