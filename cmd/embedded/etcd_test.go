package embedded

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
)

// A member without data does not start a new cluster if a running member belongs to another cluster.
func TestANewMemberMakesNoSecondCluster(t *testing.T) {
	ids := inner(t)
	peers := []string{freeAddress(t), freeAddress(t)}
	list := fmt.Sprintf("etcd-0=https://%s,etcd-1=https://%s", peers[0], peers[1])
	member := func(n int, cluster string) *Etcd {
		return &Etcd{
			Dir:            t.TempDir(),
			Listen:         "https://" + freeAddress(t),
			ID:             ids("etcd"),
			Name:           fmt.Sprintf("etcd-%d", n),
			Peer:           "https://" + peers[n],
			InitialCluster: cluster,
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	first, ended := member(0, "etcd-0=https://"+peers[0]).Runner(), make(chan error, 1)
	go func() { ended <- first.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	waited, done := context.WithTimeout(ctx, 20*time.Second)
	defer done()
	if err := first.Ready.Wait(waited); err != nil {
		t.Fatal(err)
	}
	err := member(1, list).Runner().Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "etcd-0 is a member of another cluster") {
		t.Errorf("%v", err)
	}
}
