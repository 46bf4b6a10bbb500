package publisher

import (
	"context"
	"errors"
	"io"
	"math"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxUnpublished bounds the responses of etcd that are received and not published yet, in bytes. It is enough for a
// stall of NATS by a failover. After a longer stall, etcd reads the events from its history, which costs it memory.
const maxUnpublished = 256 << 20

// etcdWatch is a watch of the keys of a prefix. It receives responses while the untaken responses have at most
// maxUnpublished bytes. Then gRPC's flow control makes etcd wait. clientv3's Watch receives and buffers without end.
type etcdWatch struct {
	stream etcdserverpb.Watch_WatchClient
	// room has the bytes that receive may still take. The caller returns a response's size to it.
	room *semaphore.Weighted
	// responses is closed after the response with an error, or after ctx.
	responses chan etcdResponse
}

// etcdResponse has all events of some revisions. A response without events and error is a progress notification: the
// watch has sent all events up to the revision.
type etcdResponse struct {
	events   []*mvccpb.Event
	revision int64
	size     int64
	err      error
}

// queuedResponses bounds the number of untaken responses. Most are small, and maxUnpublished bounds the large.
const queuedResponses = 4096

// watchEtcd starts a watch of all events from a revision on, with previous values. It ends with ctx.
func watchEtcd(ctx context.Context, client *clientv3.Client, prefix string, from int64) (*etcdWatch, error) {
	stream, err := etcdserverpb.NewWatchClient(client.ActiveConnection()).Watch(clientv3.WithRequireLeader(ctx),
		grpc.MaxCallRecvMsgSize(math.MaxInt32)) // as clientv3: an event may exceed gRPC's default of 4 MB
	if err != nil {
		return nil, rpctypes.Error(err)
	}
	w := &etcdWatch{
		stream:    stream,
		room:      semaphore.NewWeighted(maxUnpublished),
		responses: make(chan etcdResponse, queuedResponses),
	}
	err = w.send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
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
		return nil, err
	}
	go w.receive(ctx)
	return w, nil
}

// requestProgress requests a progress notification. etcd sends none while it has events to send.
func (w *etcdWatch) requestProgress() error {
	return w.send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_ProgressRequest{
		ProgressRequest: &etcdserverpb.WatchProgressRequest{},
	}})
}

// send sends a request. The error of a broken stream is in the next response.
func (w *etcdWatch) send(request *etcdserverpb.WatchRequest) error {
	if err := w.stream.Send(request); !errors.Is(err, io.EOF) {
		return rpctypes.Error(err)
	}
	return nil
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
			if r.size = min(int64(resp.Size()), maxUnpublished); w.room.Acquire(ctx, r.size) != nil {
				return
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
