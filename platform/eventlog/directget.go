package eventlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// StreamReader reads messages of the log's stream. DirectGetReader implements it with JetStream. The watch cache calls
// a registry instead, because NATS does not bound the response to a direct get: 16 requests of 64 bytes use 1.2 GB of
// its memory.
type StreamReader interface {
	// Messages calls each with the messages that the stream holds when the call begins. For ErrExpired see ReadRequest.
	Messages(ctx context.Context, r *logv1.ReadRequest, each func(*logv1.Chunk) error) error
}

const (
	// chunkMessages and chunkBytes bound one chunk. The last message of a chunk may exceed chunkBytes.
	chunkMessages = 256
	chunkBytes    = 256 << 10
	// directTimeout bounds the wait for the next message of a direct get. It is shorter than compareTimeout, because
	// the read from the leader follows it.
	directTimeout = 500 * time.Millisecond
)

// DirectGetReader reads the stream by batched direct gets (ADR-31), which any replica of the stream answers. A lagging
// replica holds all messages up to some sequence, so a returned message has no gap before it. A lagging replica may
// also return nothing too early; DirectGetReader then reads from the leader.
type DirectGetReader struct {
	JS jetstream.JetStream
	// Log identifies the stream.
	Log LogID
}

// Messages implements StreamReader.
func (d DirectGetReader) Messages(ctx context.Context, r *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	begun, err := d.info(ctx)
	if err != nil {
		return err
	}
	from, filtered := r.Sequence, r.StorageResource != ""
	switch {
	case from == 0 && filtered:
		if from, err = d.startAfter(ctx, begun.State, r.After); err != nil {
			return err
		}
	case from == 0:
		from = max(begun.State.FirstSeq, 1)
	}
	subjects := []string{">"}
	if filtered {
		subjects = []string{d.Log.Subject(Subject(r.StorageResource)), d.Log.Subject(progressSubject)}
	}
	var cursors []*cursor
	for _, s := range subjects {
		cursors = append(cursors, &cursor{direct: d, subject: s, through: from - 1, last: from - 1})
	}
	for through := from - 1; ; {
		for _, c := range cursors {
			if c.through == through {
				if err := c.advance(ctx, begun.State.LastSeq); err != nil {
					return err
				}
			}
		}
		now, err := d.info(ctx)
		if err != nil {
			return err
		}
		switch {
		case !now.Created.Equal(begun.Created):
			return errAnotherStream
		case filtered && !sameLeader(begun, now):
			return errAnotherLeader // its stream may have other messages after a sequence
		case filtered && now.State.FirstSeq > through+1:
			return ErrExpired // messages of the resource may have expired
		case filtered && hasHole(now.State):
			if lost, err := d.lacksAfter(ctx, from); err != nil || lost {
				return cmp.Or(err, ErrExpired) // a lost message may be of the resource
			}
		}
		chunk := &logv1.Chunk{Created: now.Created.UnixNano(), Last: now.State.LastSeq}
		through = merge(cursors, chunk)
		if err := each(chunk); err != nil {
			return err
		}
		if through >= begun.State.LastSeq {
			return nil
		}
	}
}

// errAnotherLeader means that the stream changed its leader during a read of a resource.
var errAnotherLeader = errors.New("the event log's stream has changed its leader")

// sameLeader returns whether a stream had the same leader for the same time. A single server has none.
func sameLeader(a, b *jetstream.StreamInfo) bool {
	leader := func(i *jetstream.StreamInfo) (name string, since time.Time) {
		if i.Cluster == nil {
			return "", time.Time{}
		}
		if i.Cluster.LeaderSince != nil {
			since = *i.Cluster.LeaderSince
		}
		return i.Cluster.Leader, since
	}
	name, since := leader(a)
	otherName, otherSince := leader(b)
	return name == otherName && since.Equal(otherSince)
}

// hasHole returns whether the stream has lost a message between two others. A reader of all messages finds that by
// their sequences and IDs, but a reader of a resource receives only some of the messages.
func hasHole(s jetstream.StreamState) bool { return s.Msgs > 0 && s.Msgs != s.LastSeq-s.FirstSeq+1 }

// lacksAfter returns whether the stream has lost a message at a sequence or after it.
func (d DirectGetReader) lacksAfter(ctx context.Context, sequence uint64) (bool, error) {
	stream, err := d.Log.stream(ctx, d.JS)
	if err != nil {
		return false, err
	}
	info, err := stream.Info(ctx, jetstream.WithDeletedDetails(true))
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(info.State.Deleted, func(lost uint64) bool { return lost >= sequence }), nil
}

// previousHeader is the name of the header with the sequence of the message before it on the same subject, or 0. A
// reader of a subject finds a message by it that a server of the stream has lost. Messages of older releases do not
// have it.
const previousHeader = "Watershed-Previous-Sequence"

// subjectMessage is a message of a subject, with the sequence of previousHeader. It is 0 without the header.
type subjectMessage struct {
	*logv1.StoredMessage
	previous uint64
}

func newSubjectMessage(header nats.Header, sequence uint64, data []byte) subjectMessage {
	previous, _ := strconv.ParseUint(header.Get(previousHeader), 10, 64)
	return subjectMessage{storedMessage(header, sequence, data), previous}
}

// cursor is the progress of reading one subject. All messages up to through were read, and next holds the pending
// messages. last is the sequence of the subject's last message, or of a message before the first.
type cursor struct {
	direct        DirectGetReader
	subject       string
	through, last uint64
	next          []*logv1.StoredMessage
}

// follows returns true if no message of the subject is between the last message and the message m.
func (c *cursor) follows(m subjectMessage) bool {
	if c.subject == ">" {
		return m.Sequence == c.through+1
	}
	return m.previous <= c.last
}

// add adds a message.
func (c *cursor) add(m subjectMessage) {
	c.next, c.through, c.last = append(c.next, m.StoredMessage), m.Sequence, m.Sequence
}

// advance reads messages after through. If the leader holds none, through becomes last.
func (c *cursor) advance(ctx context.Context, last uint64) error {
	if c.through >= last {
		c.through = max(c.through, last)
		return nil
	}
	messages, err := c.direct.batch(ctx, c.subject, c.through+1)
	if err != nil {
		return err
	}
	added := false
	for _, m := range messages {
		if !c.follows(m) { // the leader is read for the gap
			break
		}
		c.add(m)
		added = true
	}
	if added {
		return nil
	}
	raw, err := c.direct.Log.getNext(ctx, c.direct.JS, c.subject, c.through+1)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		c.through = last
		return nil
	}
	if err != nil {
		return err
	}
	m := newSubjectMessage(raw.Header, raw.Sequence, raw.Data)
	if c.subject != ">" && !c.follows(m) {
		return ErrExpired // the leader has lost a message
	}
	c.add(m)
	return nil
}

// merge moves the messages up to the lowest position of all cursors to the chunk, in order. It returns that sequence.
func merge(cursors []*cursor, chunk *logv1.Chunk) uint64 {
	chunk.Through = cursors[0].through
	for _, c := range cursors {
		chunk.Through = min(chunk.Through, c.through)
	}
	for _, c := range cursors {
		n := 0
		for n < len(c.next) && c.next[n].Sequence <= chunk.Through {
			n++
		}
		chunk.Messages = append(chunk.Messages, c.next[:n]...)
		c.next = c.next[n:]
	}
	slices.SortFunc(chunk.Messages, func(a, b *logv1.StoredMessage) int { return cmp.Compare(a.Sequence, b.Sequence) })
	return chunk.Through
}

func (d DirectGetReader) info(ctx context.Context) (*jetstream.StreamInfo, error) {
	stream, err := d.Log.stream(ctx, d.JS)
	if err != nil {
		return nil, err
	}
	return stream.CachedInfo(), nil
}

// batch returns the messages of one direct get. The batch may end early, or be empty. Each message names the sequence
// of its predecessor in the batch, so the batch has no gap, even on one subject.
func (d DirectGetReader) batch(ctx context.Context, subject string, sequence uint64) ([]subjectMessage, error) {
	nc := d.JS.Conn()
	body, err := json.Marshal(map[string]any{
		"seq":          sequence,
		"next_by_subj": subject,
		"batch":        chunkMessages,
		"max_bytes":    chunkBytes,
	})
	if err != nil {
		return nil, err
	}
	received := make(chan *nats.Msg, chunkMessages+1) // the NATS client drops a message that does not fit
	inbox, err := nc.ChanSubscribe(nc.NewInbox(), received)
	if err != nil {
		return nil, err
	}
	defer func() { _ = inbox.Unsubscribe() }()
	if err := nc.PublishRequest(api+"DIRECT.GET."+d.Log.Stream(), inbox.Subject, body); err != nil {
		return nil, err
	}
	var messages []subjectMessage
	before := "0"
	timeout := time.NewTimer(directTimeout)
	defer timeout.Stop()
	for {
		var m *nats.Msg
		select {
		case m = <-received:
		case <-timeout.C:
			return messages, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		sequence, err := sequenceOf(m)
		if err != nil || m.Header.Get(jetstream.LastSequenceHeader) != before { // a status message, or a lost message
			return messages, nil
		}
		messages = append(messages, newSubjectMessage(m.Header, sequence, m.Data))
		before = strconv.FormatUint(sequence, 10)
		timeout.Reset(directTimeout)
	}
}

// sequenceOf returns the sequence of a message that NATS republished or returned to a direct get.
func sequenceOf(m *nats.Msg) (uint64, error) {
	return strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
}

// startAfter returns the sequence of a message before which every message is of the revision after, or older. It
// returns ErrExpired if the stream no longer holds such a message, and errAnotherStream before the log has begun.
func (d DirectGetReader) startAfter(ctx context.Context, state jetstream.StreamState, after int64) (uint64, error) {
	first, last := state.FirstSeq, state.LastSeq
	switch {
	case last == 0:
		return 0, errAnotherStream
	case state.Msgs == 0:
		return 0, ErrExpired
	}
	before, err := d.revisionBefore(ctx, first)
	if err != nil {
		return 0, err
	}
	if before > after {
		return 0, ErrExpired
	}
	var failed error
	n := sort.Search(int(last-first), func(i int) bool {
		before, err := d.revisionBefore(ctx, first+uint64(i)+1)
		if err != nil {
			failed = err
		}
		return failed != nil || before > after
	})
	return first + uint64(n), failed
}

// revisionBefore returns the revision up to which the log is complete before a message: that of its predecessor. If the
// stream has lost the message, the next message is used.
func (d DirectGetReader) revisionBefore(ctx context.Context, sequence uint64) (int64, error) {
	m, err := d.Log.getNext(ctx, d.JS, ">", sequence)
	if err != nil {
		return 0, fmt.Errorf("message %d of the log: %w", sequence, err)
	}
	if err := verify(storedMessage(m.Header, m.Sequence, m.Data)); err != nil {
		d.Log.reportCorrupt(m.Sequence, err)
		return 0, ErrExpired // its position may be wrong
	}
	name := m.Header.Get(jetstream.ExpectedLastMsgIDHeader)
	if name == "" { // the first message of the log
		name = m.Header.Get(jetstream.MsgIDHeader)
	}
	id, err := core.ParseID(name)
	if err != nil {
		return 0, err
	}
	if !id.Progress && id.Index == 0 && name == m.Header.Get(jetstream.MsgIDHeader) {
		return id.Revision - 1, nil
	}
	return id.Revision, nil
}
