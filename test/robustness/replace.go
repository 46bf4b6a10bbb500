package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// versioned returns the processes that both binaries can run.
func (c *cluster) versioned() (found []*process) {
	for _, p := range c.processes {
		if p.name != reference && p.name != controllers {
			found = append(found, p)
		}
	}
	return found
}

// replaceable returns the processes whose disk may be lost alone, because two others have its data.
func (c *cluster) replaceable() (found []*process) {
	for _, prefix := range []string{"etcd-", "nats-"} {
		if members := c.named(prefix); len(members) > 2 {
			found = append(found, members...)
		}
	}
	return found
}

// replace removes the disk of a member, which does not run. A member of etcd leaves the cluster first, and joins it
// again as a new member, as etcd's documentation describes. No other member of etcd leaves before it is added again,
// because two missing members are a majority. A NATS server returns with its name.
func (c *cluster) replace(p *process) error {
	if !strings.HasPrefix(p.name, "etcd-") {
		return os.RemoveAll(p.data)
	}
	if !c.replacing.TryLock() {
		return errors.New("another member is being replaced")
	}
	defer c.replacing.Unlock()
	client, err := c.etcdClient()
	if err != nil {
		return err
	}
	defer client.Close()
	if err := p.retry(func(ctx context.Context) error { return removeMember(ctx, client, p.peer) }); err != nil {
		return err
	}
	err = p.retry(func(ctx context.Context) error {
		_, err := client.MemberAdd(ctx, []string{p.peer})
		if errors.Is(err, rpctypes.ErrPeerURLExist) { // an earlier attempt has added it
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	if joins := "--initial-cluster-state=existing"; !slices.Contains(p.args, joins) {
		p.args = append(p.args, joins)
	}
	return os.RemoveAll(p.data)
}

// retry calls attempt until it succeeds or p is stopped. etcd refuses a change without a healthy majority, and a change
// without a response may have happened.
func (p *process) retry(attempt func(context.Context) error) error {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err := attempt(ctx)
		cancel()
		if err == nil || p.isStopped() {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// removeMember removes a member of etcd by its peer URL. It returns nil if there is no such member.
func removeMember(ctx context.Context, client *clientv3.Client, peer string) error {
	list, err := client.MemberList(ctx)
	if err != nil {
		return err
	}
	for _, m := range list.Members {
		if slices.Contains(m.PeerURLs, peer) {
			_, err := client.MemberRemove(ctx, m.ID)
			return err
		}
	}
	return nil
}
