package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/test/robustness/history"
)

// truth reads etcd's own event sequence, without the components under test.
type truth struct {
	client    *clientv3.Client
	resources []*resource
	mu        sync.Mutex
	seen      int64
	err       error
}

// registryPrefix is the prefix of all keys in etcd.
const registryPrefix = "/registry/"

// tailEtcd records etcd's events of the resources from now on. A single watch receives the events of all keys, so it
// follows etcd although some resources do not change.
func tailEtcd(ctx context.Context, c *cluster, resources []*resource) (*truth, error) {
	client, err := c.etcdClient()
	if err != nil {
		return nil, err
	}
	t := &truth{client: client, resources: resources}
	go t.read(ctx)
	return t, nil
}

func (t *truth) read(ctx context.Context) {
	for from := int64(1); ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		for resp := range t.client.Watch(ctx, registryPrefix, clientv3.WithPrefix(),
			clientv3.WithPrevKV(), clientv3.WithRev(from)) {
			for _, e := range resp.Events {
				t.record(e)
				from = e.Kv.ModRevision + 1
			}
		}
	}
}

func (t *truth) record(e *clientv3.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.resources {
		name, ok := strings.CutPrefix(string(e.Kv.Key), x.prefix)
		if !ok || !strings.HasPrefix(name, ours) {
			continue
		}
		c := history.Change{Revision: e.Kv.ModRevision, Key: name}
		kv := e.Kv
		switch {
		case e.Type == clientv3.EventTypeDelete:
			c.Type, kv = "DELETED", e.PrevKv
		case e.IsCreate():
			c.Type = "ADDED"
		default:
			c.Type = "MODIFIED"
		}
		o, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), kv.Value)
		if err != nil {
			t.err = fmt.Errorf("decode %s: %w", e.Kv.Key, err)
		} else if m, err := meta.Accessor(o); err == nil {
			c.Value, c.Shard = m.GetAnnotations()["value"], m.GetLabels()["shard"]
		}
		x.history.Changes = append(x.history.Changes, c)
	}
	t.seen = e.Kv.ModRevision
}

// reached returns the revision of the last recorded change.
func (t *truth) reached() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen
}

// firstFinal returns the revision of a resource's first final write, after truth has read etcd's last revision.
func (t *truth) firstFinal(ctx context.Context, x *resource) (int64, error) {
	now, err := t.client.Get(ctx, x.prefix+ours, clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	var last, first int64
	for _, kv := range now.Kvs {
		last = max(last, kv.ModRevision)
		if strings.HasPrefix(string(kv.Key), x.prefix+final("")) && (first == 0 || kv.ModRevision < first) {
			first = kv.ModRevision
		}
	}
	for {
		t.mu.Lock()
		err := t.err
		t.mu.Unlock()
		if err != nil || t.reached() >= last {
			return first, err
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		time.Sleep(20 * time.Millisecond)
	}
}
