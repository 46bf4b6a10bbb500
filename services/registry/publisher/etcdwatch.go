package publisher

import (
	"context"
	"math"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// etcdWatch is a watch of the keys of a prefix. It receives a response from etcd only after the caller has taken the
// response before it. gRPC's flow control makes etcd wait, and etcd reads the missed events from its history.
// clientv3's Watch receives without end, and buffers all responses that its caller has not taken.
type etcdWatch struct {
	stream etcdserverpb.Watch_WatchClient
	// responses is closed after the response with an error, or after ctx.
	responses chan etcdResponse
}

// etcdResponse has all events of some revisions. A response without events and error is a progress notification: the
// watch has sent all events up to the revision.
type etcdResponse struct {
	events   []*mvccpb.Event
	revision int64
	err      error
}

// watchEtcd starts a watch of all events from a revision on, with previous values. It ends with ctx.
func watchEtcd(ctx context.Context, client *clientv3.Client, prefix string, from int64) (*etcdWatch, error) {
	stream, err := etcdserverpb.NewWatchClient(client.ActiveConnection()).Watch(clientv3.WithRequireLeader(ctx),
		grpc.MaxCallRecvMsgSize(math.MaxInt32)) // as clientv3: an event may exceed gRPC's default of 4 MB
	if err != nil {
		return nil, rpctypes.Error(err)
	}
	err = stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
		CreateRequest: &etcdserverpb.WatchCreateRequest{
			Key:            []byte(prefix),
			RangeEnd:       []byte(clientv3.GetPrefixRangeEnd(prefix)),
			StartRevision:  from,
			PrevKv:         true,
			ProgressNotify: true,
			Fragment:       true,
		},
	}})
	if err != nil {
		return nil, rpctypes.Error(err)
	}
	w := &etcdWatch{stream: stream, responses: make(chan etcdResponse)}
	go w.receive(ctx)
	return w, nil
}

// requestProgress requests a progress notification. etcd sends none while it has events to send.
func (w *etcdWatch) requestProgress() error {
	err := w.stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_ProgressRequest{
		ProgressRequest: &etcdserverpb.WatchProgressRequest{},
	}})
	return rpctypes.Error(err)
}

// receive receives etcd's responses until ctx or the watch ends.
func (w *etcdWatch) receive(ctx context.Context) {
	defer close(w.responses)
	var begun []*mvccpb.Event // events of a revision whose other events may be in the next fragment
	for {
		resp, err := w.stream.Recv()
		if err == nil {
			err = canceled(resp)
		}
		r := etcdResponse{err: rpctypes.Error(err)}
		if err == nil {
			if resp.Created {
				continue
			}
			r.revision, r.events = resp.Header.Revision, append(begun, resp.Events...)
			begun = nil
			if resp.Fragment {
				n := lastRevision(r.events)
				if r.events, begun = r.events[:n], slices.Clone(r.events[n:]); n == 0 {
					continue
				}
			}
		}
		select {
		case w.responses <- r:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// canceled returns why etcd has canceled the watch; nil if it has not.
func canceled(resp *etcdserverpb.WatchResponse) error {
	switch {
	case resp.CompactRevision != 0:
		return rpctypes.ErrCompacted
	case resp.Canceled && resp.CancelReason != "":
		return status.Error(codes.FailedPrecondition, resp.CancelReason)
	case resp.Canceled:
		return rpctypes.ErrFutureRev
	}
	return nil
}

// lastRevision returns the index of the first event of the last revision.
func lastRevision(events []*mvccpb.Event) int {
	n := max(len(events)-1, 0)
	for n > 0 && events[n-1].Kv.ModRevision == events[n].Kv.ModRevision {
		n--
	}
	return n
}
