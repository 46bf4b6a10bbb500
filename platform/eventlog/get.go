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

// get reads one message by STREAM.MSG.GET, which the leader of the stream answers. The methods of jetstream.Stream use
// direct gets, which a lagging replica may answer.
func (l LogID) get(ctx context.Context, js jetstream.JetStream,
	request map[string]any) (*jetstream.RawStreamMsg, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	m, err := js.Conn().RequestWithContext(ctx, api+"STREAM.MSG.GET."+l.Stream(), body)
	if err != nil {
		return nil, err
	}
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
	if err := json.Unmarshal(m.Data, &response); err != nil {
		return nil, err
	}
	switch {
	case response.Error == nil:
	case response.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, jetstream.ErrMsgNotFound
	default:
		return nil, response.Error
	}
	var header nats.Header
	if len(response.Message.Header) > 0 {
		if header, err = nats.DecodeHeadersMsg(response.Message.Header); err != nil {
			return nil, fmt.Errorf("message %d of the log: %w", response.Message.Sequence, err)
		}
	}
	return &jetstream.RawStreamMsg{
		Subject:  response.Message.Subject,
		Sequence: response.Message.Sequence,
		Header:   header,
		Data:     response.Message.Data,
		Time:     response.Message.Time,
	}, nil
}
