package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/watchcache/core"
)

// api is the prefix of JetStream's API.
const api = "$JS.API."

const (
	// firstAttempt is the time that the first attempt of a request to JetStream has. Each next attempt has a quarter
	// more, so maxAttempts have 9 s. Short attempts find the next leader soon, and long attempts have time for a large
	// response.
	firstAttempt = 100 * time.Millisecond
	maxAttempts  = 14
)

// attempt calls a request to JetStream until it has a response, at most maxAttempts times. A request has no response
// if the leader of the stream, or of the cluster, is lost. A later request finds the next leader. The last attempt has
// 1.8 s, so a request that always needs longer fails. Only timeouts are repeated. The request must be idempotent.
func attempt[T any](ctx context.Context, request func(context.Context) (T, error)) (response T, err error) {
	timeout := firstAttempt
	for range maxAttempts {
		attemptCtx, cancel := context.WithTimeout(ctx, timeout)
		response, err = request(attemptCtx)
		cancel()
		timeout += timeout / 4
		if !isTimeout(err) || ctx.Err() != nil {
			break
		}
	}
	return response, err
}

func isTimeout(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)
}

// stream returns the stream with its state.
func (l LogID) stream(ctx context.Context, js jetstream.JetStream) (jetstream.Stream, error) {
	return attempt(ctx, func(ctx context.Context) (jetstream.Stream, error) { return js.Stream(ctx, l.Stream()) })
}

// get reads one message by STREAM.MSG.GET, which the leader of the stream answers. The methods of jetstream.Stream use
// direct gets, which a lagging replica may answer.
func (l LogID) get(ctx context.Context, js jetstream.JetStream,
	request map[string]any) (*jetstream.RawStreamMsg, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	m, err := attempt(ctx, func(ctx context.Context) (*nats.Msg, error) {
		return js.Conn().RequestWithContext(ctx, api+"STREAM.MSG.GET."+l.Stream(), body)
	})
	if err != nil {
		return nil, err
	}
	return rawMessage(m.Data)
}

// rawMessage returns the message in a response to STREAM.MSG.GET.
func rawMessage(data []byte) (*jetstream.RawStreamMsg, error) {
	var response struct {
		Error   *jetstream.APIError `json:"error"`
		Message struct {
			Subject  string    `json:"subject"`
			Sequence uint64    `json:"seq"`
			Header   []byte    `json:"hdrs"`
			Data     []byte    `json:"data"`
			Time     time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(data, &response); err != nil {
		return nil, err
	}
	switch {
	case response.Error == nil:
	case response.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, jetstream.ErrMsgNotFound
	default:
		return nil, response.Error
	}
	// headers that cannot be decoded are none: the message is then corrupt (LogID.events)
	header, _ := nats.DecodeHeadersMsg(response.Message.Header)
	return &jetstream.RawStreamMsg{
		Subject:  response.Message.Subject,
		Sequence: response.Message.Sequence,
		Header:   header,
		Data:     response.Message.Data,
		Time:     response.Message.Time,
	}, nil
}

// Get returns a message from the leader of the stream, or jetstream.ErrMsgNotFound.
func (l LogID) Get(ctx context.Context, js jetstream.JetStream, sequence uint64) (*jetstream.RawStreamMsg, error) {
	return l.get(ctx, js, map[string]any{"seq": sequence})
}

// GetLast returns the last message of a subject from the leader of the stream. The subject is a subject of the log.
func (l LogID) GetLast(ctx context.Context, js jetstream.JetStream, subject string) (*jetstream.RawStreamMsg, error) {
	return l.get(ctx, js, map[string]any{"last_by_subj": subject})
}

// getNext returns the first message of a subject at a sequence or later, from the leader of the stream.
func (l LogID) getNext(ctx context.Context, js jetstream.JetStream, subject string,
	sequence uint64) (*jetstream.RawStreamMsg, error) {
	return l.get(ctx, js, map[string]any{"seq": sequence, "next_by_subj": subject})
}

// Last returns the id of the log's last message. sequence is the stream's last sequence. ok is false for an empty log,
// and for a log whose last message is corrupt or lost: no message can follow it, and the log begins again.
func (l LogID) Last(ctx context.Context, js jetstream.JetStream) (id core.ID, sequence uint64, ok bool, err error) {
	stream, err := l.stream(ctx, js)
	if err != nil {
		return core.ID{}, 0, false, err
	}
	state := stream.CachedInfo().State
	if state.Msgs == 0 {
		return core.ID{}, state.LastSeq, false, nil
	}
	m, err := l.Get(ctx, js, state.LastSeq)
	if errors.Is(err, jetstream.ErrMsgNotFound) { // it is lost, or the leader has changed and lags
		if stream, err := l.stream(ctx, js); err != nil {
			return core.ID{}, 0, false, err
		} else if s := stream.CachedInfo().State; s.LastSeq == state.LastSeq && hasHole(s) {
			return core.ID{}, s.LastSeq, false, nil
		}
	}
	if err != nil {
		return core.ID{}, 0, false, fmt.Errorf("message %d of the log: %w", state.LastSeq, err)
	}
	if _, err := l.events(storedMessage(m.Header, m.Sequence, m.Data)); err != nil {
		return core.ID{}, state.LastSeq, false, nil
	}
	id, err = core.ParseID(m.Header.Get(jetstream.MsgIDHeader))
	if err != nil {
		l.reportCorrupt(m.Sequence, err)
		return core.ID{}, state.LastSeq, false, nil
	}
	return id, state.LastSeq, true, nil
}
