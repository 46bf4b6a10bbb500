package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/test/robustness/history"
)

// truth reads etcd's own event sequence, without the components under test.
type truth struct {
	client  *clientv3.Client
	history *history.History
	mu      sync.Mutex
	seen    int64
	err     error
}

const etcdPrefix = "/registry/configmaps/" + namespace + "/"

// tailEtcd records etcd's events from now on.
func tailEtcd(ctx context.Context, c *cluster, h *history.History) (*truth, error) {
	client, err := c.etcdClient()
	if err != nil {
		return nil, err
	}
	t := &truth{client: client, history: h}
	go t.read(ctx)
	return t, nil
}

func (t *truth) read(ctx context.Context) {
	for from := int64(1); ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		for resp := range t.client.Watch(ctx, etcdPrefix, clientv3.WithPrefix(),
			clientv3.WithPrevKV(), clientv3.WithRev(from)) {
			for _, e := range resp.Events {
				t.record(e)
				from = e.Kv.ModRevision + 1
			}
		}
	}
}

func (t *truth) record(e *clientv3.Event) {
	c := history.Change{Revision: e.Kv.ModRevision, Key: strings.TrimPrefix(string(e.Kv.Key), etcdPrefix)}
	kv := e.Kv
	switch {
	case e.Type == clientv3.EventTypeDelete:
		c.Type, kv = "DELETED", e.PrevKv
	case e.IsCreate():
		c.Type = "ADDED"
	default:
		c.Type = "MODIFIED"
	}
	var o corev1.ConfigMap
	err := runtime.DecodeInto(scheme.Codecs.UniversalDeserializer(), kv.Value, &o)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.err = fmt.Errorf("decode %s: %w", e.Kv.Key, err)
	}
	c.Value, c.Shard = o.Data["value"], o.Labels["shard"]
	t.seen = c.Revision
	t.history.Changes = append(t.history.Changes, c)
}

// reached returns the revision of the last recorded change.
func (t *truth) reached() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen
}

// finish calls write until it succeeds, and waits until truth has read etcd's last revision. It returns the revision
// of the first final write.
func (t *truth) finish(ctx context.Context, write func() error) (int64, error) {
	err := write()
	for ; err != nil && ctx.Err() == nil; err = write() {
		time.Sleep(500 * time.Millisecond)
	}
	if err != nil {
		return 0, err
	}
	now, err := t.client.Get(ctx, etcdPrefix, clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	var last, first int64
	for _, kv := range now.Kvs {
		last = max(last, kv.ModRevision)
		if strings.HasPrefix(string(kv.Key), etcdPrefix+"final-") && (first == 0 || kv.ModRevision < first) {
			first = kv.ModRevision
		}
	}
	for {
		t.mu.Lock()
		err := t.err
		t.mu.Unlock()
		if err != nil {
			return 0, err
		}
		if t.reached() >= last {
			t.client.Close()
			return first, nil
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		time.Sleep(20 * time.Millisecond)
	}
}
