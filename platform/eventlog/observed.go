package eventlog

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// endsTimeout is how long ObservedEnds waits for responses. The number of registries is unknown.
const endsTimeout = 250 * time.Millisecond

// maxEnds bounds the responses that ObservedEnds reads.
const maxEnds = 100

// ObservedEnds requests the ends of the log that the other registries have read. It waits for endsTimeout, unless no
// registry has read the log.
func (l LogID) ObservedEnds(ctx context.Context, nc *nats.Conn) (ends []core.LogEnd, err error) {
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := nc.PublishRequest(l.Subject(endRequestSubject), inbox, nil); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, endsTimeout)
	defer cancel()
	for len(ends) < maxEnds {
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil || len(m.Data) == 0 { // the server responds without data if no registry subscribes
			return ends, nil
		}
		e := &logv1.ObservedEnd{}
		if proto.Unmarshal(m.Data, e) != nil {
			continue
		}
		ends = append(ends, core.LogEnd{
			Last: core.ID{Revision: e.Revision},
			Progress: &logv1.Event{
				Epoch:            e.Epoch,
				FencingToken:     e.FencingToken,
				NextFencingToken: e.NextFencingToken,
			},
			Event: core.EtcdEvent{Key: e.Key, Revision: e.KeyRevision, Deleted: e.Deleted},
		})
	}
	return ends, nil
}

// ServeObservedEnd responds to each ObservedEnds with the result of end, which must not be empty.
func (l LogID) ServeObservedEnd(nc *nats.Conn, end func() core.LogEnd) (*nats.Subscription, error) {
	return nc.Subscribe(l.Subject(endRequestSubject), func(m *nats.Msg) {
		e := end()
		data, err := proto.Marshal(&logv1.ObservedEnd{
			Revision:         e.Last.Revision,
			Epoch:            e.Progress.GetEpoch(),
			FencingToken:     e.Progress.GetFencingToken(),
			NextFencingToken: e.Progress.GetNextFencingToken(),
			Key:              e.Event.Key,
			KeyRevision:      e.Event.Revision,
			Deleted:          e.Event.Deleted,
		})
		if err == nil {
			_ = m.Respond(data)
		}
	})
}
