package eventlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/lru"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// checksumHeader is the name of the header that has the checksum of a message (StoredMessage.checksum). JetStream has
// checksums of its blocks. They do not cover the memory of its servers, their network, and a misplaced record.
const checksumHeader = "Watershed-Checksum"

// errChecksum means that a message is not as the publisher wrote it.
var errChecksum = errors.New("the checksum of the message is wrong, or it has no ID")

// checksum returns the checksum of a message. A zero byte ends each header.
func checksum(m *logv1.StoredMessage) string {
	h := xxhash.New()
	for _, header := range []string{m.Id, m.ExpectedLastMsgId, m.Encoding} {
		_, _ = h.WriteString(header)
		_, _ = h.Write([]byte{0})
	}
	_, _ = h.Write(m.Data)
	return fmt.Sprintf("%016x", h.Sum64())
}

// storedMessage returns the message of a sequence.
func storedMessage(header nats.Header, sequence uint64, data []byte) *logv1.StoredMessage {
	return &logv1.StoredMessage{
		Sequence:          sequence,
		Id:                header.Get(jetstream.MsgIDHeader),
		ExpectedLastMsgId: header.Get(jetstream.ExpectedLastMsgIDHeader),
		Encoding:          header.Get(encodingHeader),
		Data:              data,
		Checksum:          header.Get(checksumHeader),
	}
}

// eventsOf returns the events of a message. There is at least a single event, unless it returns an error.
func eventsOf(m *logv1.StoredMessage) ([]*logv1.Event, error) {
	if err := verify(m); err != nil {
		return nil, err
	}
	events, ok := appended.Get(messageKey{m.Id, m.Checksum})
	if ok && !CheckAppended {
		return events, nil
	}
	decoded, err := decode(m.Encoding, m.Data)
	equal := func(a, b *logv1.Event) bool { return proto.Equal(a, b) }
	if ok && !slices.EqualFunc(events, decoded, equal) {
		panic(fmt.Sprintf("the message %s has other events than its writer: %v, %v", m.Id, decoded, err))
	}
	return decoded, err
}

// events returns the events of a message, as eventsOf does. It reports a corrupt message.
func (l LogID) events(m *logv1.StoredMessage) ([]*logv1.Event, error) {
	events, err := eventsOf(m)
	if err != nil {
		l.reportCorrupt(m.Sequence, err)
	}
	return events, err
}

// reported has the corrupt messages that reportCorrupt has logged as errors. Each watch that resumes before a corrupt
// message reads the message.
var reported = lru.New[reportedMessage, bool](64)

type reportedMessage struct {
	stream   string
	sequence uint64
	reason   string
}

// reportCorrupt counts and logs a read of a corrupt message. Further reads of the message have verbosity 4.
func (l LogID) reportCorrupt(sequence uint64, reason error) {
	corruptMessages.Inc()
	level, message := slog.LevelError, reportedMessage{l.Stream(), sequence, reason.Error()}
	if _, ok := reported.Get(message); ok {
		level = slog.LevelDebug
	}
	reported.Put(message, true, 1)
	slog.Log(context.Background(), level, "A message of the event log is corrupt", "stream", l.Stream(), "sequence", sequence, "error", reason)
}

var corruptMessages = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "watershed_event_log_corrupt_messages_total",
	Help: "Reads of a corrupt message of the event log, whose checksum is wrong or which cannot be decoded. The log " +
		"names the message.",
})

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{corruptMessages} }

// CheckAppended makes readers decode each message, and panic if its events differ from the events in appended. Tests
// set it.
var CheckAppended bool

// messageKey identifies a message. The checksum covers its data.
type messageKey struct{ id, checksum string }

// appended has the events of the last messages that a Writer of this process has appended. The readers of the process
// share the events, and do not decode them. Readers must not change these events.
var appended = lru.New[messageKey, []*logv1.Event](appendedBytes)

// SweepAppended drops the events that no reader has received for the duration idle. A later reader decodes the message.
func SweepAppended(idle time.Duration) { appended.EvictIdle(idle) }

// appendedBytes bounds appended. Readers receive a message some milliseconds after it was appended.
const appendedBytes = 8 << 20

// decodedBytes is about the size of a decoded event beyond its encoding.
const decodedBytes = 1 << 10

// verify returns errChecksum if a message has no ID, or another checksum. It does not decode the events.
func verify(m *logv1.StoredMessage) error {
	if m.Id == "" || m.Checksum != "" && m.Checksum != checksum(m) {
		return errChecksum
	}
	return nil
}
