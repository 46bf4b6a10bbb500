package eventlog

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// api is the prefix of JetStream's API.
const api = "$JS.API."

// get reads one message by STREAM.MSG.GET, which the stream's leader answers. The methods of jetstream.Stream use
// direct gets, which a replica that lags may answer.
func get(ctx context.Context, js jetstream.JetStream, request map[string]any) (*jetstream.RawStreamMsg, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	m, err := js.Conn().RequestWithContext(ctx, api+"STREAM.MSG.GET."+StreamName, body)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Error   *jetstream.APIError `json:"error"`
		Message struct {
			Subject  string    `json:"subject"`
			Sequence uint64    `json:"seq"`
			Header   []byte    `json:"hdrs"`
			Data     []byte    `json:"data"`
			Time     time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		return nil, err
	}
	switch {
	case answer.Error == nil:
	case answer.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, jetstream.ErrMsgNotFound
	default:
		return nil, answer.Error
	}
	var header nats.Header
	if len(answer.Message.Header) > 0 {
		if header, err = nats.DecodeHeadersMsg(answer.Message.Header); err != nil {
			return nil, fmt.Errorf("message %d of the log: %w", answer.Message.Sequence, err)
		}
	}
	return &jetstream.RawStreamMsg{
		Subject:  answer.Message.Subject,
		Sequence: answer.Message.Sequence,
		Header:   header,
		Data:     answer.Message.Data,
		Time:     answer.Message.Time,
	}, nil
}
