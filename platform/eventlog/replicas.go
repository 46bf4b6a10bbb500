package eventlog

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// maxReplicaLag and maxReplicaSilence bound how many messages a current replica is behind the leader of the stream, and
// how old its last response to the leader is.
const (
	maxReplicaLag     = 1000
	maxReplicaSilence = 10 * time.Second
)

// CurrentReplicas returns the number of current replicas of a stream. The leader, which responds, is current.
//
// PeerInfo.Current is false for each replica that has not stored the newest committed message. With three healthy
// servers on a host and 2,000 messages a second, 19 % of the responses have such a replica. CurrentReplicas therefore
// permits a lag. PeerInfo.Active is 0 for a replica that has not responded to this leader yet.
func CurrentReplicas(info *jetstream.StreamInfo) int {
	current := 1
	if info.Cluster == nil {
		return current
	}
	for _, r := range info.Cluster.Replicas {
		follows := r.Lag <= maxReplicaLag && r.Active > 0 && r.Active < maxReplicaSilence
		if !r.Offline && (r.Current || follows) {
			current++
		}
	}
	return current
}

// MissingReplicas returns how many of --log-replicas are not current.
func (o *Options) MissingReplicas(ctx context.Context, js jetstream.JetStream) (int, error) {
	stream, err := o.ID.stream(ctx, js)
	if err != nil {
		return 0, err
	}
	return max(o.Replicas-CurrentReplicas(stream.CachedInfo()), 0), nil
}
