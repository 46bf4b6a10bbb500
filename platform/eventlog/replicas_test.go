package eventlog

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A replica is current if it follows the leader closely. The replicas of a busy stream are always some messages behind.
func TestCurrentReplicas(t *testing.T) {
	current := &jetstream.PeerInfo{Current: true}
	cluster := func(replicas ...*jetstream.PeerInfo) *jetstream.ClusterInfo {
		return &jetstream.ClusterInfo{Leader: "nats-0", Replicas: replicas}
	}
	for name, c := range map[string]struct {
		cluster *jetstream.ClusterInfo
		want    int
	}{
		"a server without a cluster":  {nil, 1},
		"a stream with one replica":   {cluster(), 1},
		"three current replicas":      {cluster(current, current), 3},
		"a removed replica":           {cluster(current), 2},
		"an offline replica":          {cluster(current, &jetstream.PeerInfo{Current: true, Offline: true}), 2},
		"a replica of a busy stream":  {cluster(current, &jetstream.PeerInfo{Lag: 200, Active: time.Millisecond}), 3},
		"a replica that copies":       {cluster(current, &jetstream.PeerInfo{Lag: 1e5, Active: time.Millisecond}), 2},
		"a silent replica, small lag": {cluster(current, &jetstream.PeerInfo{Lag: 2, Active: 12 * time.Second}), 2},
		"a silent replica, idle log":  {cluster(current, &jetstream.PeerInfo{Active: 12 * time.Second}), 2},
		"lost before the election":    {cluster(current, &jetstream.PeerInfo{Lag: 200}), 2},
		"a replica that did not join": {cluster(current, &jetstream.PeerInfo{Pending: true}), 2},
	} {
		if got := CurrentReplicas(&jetstream.StreamInfo{Cluster: c.cluster}); got != c.want {
			t.Errorf("%s: %d current replicas, want %d", name, got, c.want)
		}
	}
}
