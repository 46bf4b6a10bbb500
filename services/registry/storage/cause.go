package storage

import (
	"context"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"

	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// TellCauses has tell called before each write of a traced request. It is set before anything is written.
func (s *Storage) TellCauses(tell func(*logv1.TraceContext)) {
	s.Client.Kubernetes = &tracedWrites{s.Client.Kubernetes, tell}
}

// tracedWrites is etcd's client as upstream's storage uses it.
type tracedWrites struct {
	etcdkubernetes.Interface
	tell func(*logv1.TraceContext)
}

// OptimisticPut implements etcd's client.
func (t *tracedWrites) OptimisticPut(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (etcdkubernetes.PutResponse, error) {
	t.cause(ctx, key, expected)
	return t.Interface.OptimisticPut(ctx, key, value, expected, opts)
}

// OptimisticDelete implements etcd's client.
func (t *tracedWrites) OptimisticDelete(ctx context.Context, key string, expected int64,
	opts etcdkubernetes.DeleteOptions) (etcdkubernetes.DeleteResponse, error) {
	t.cause(ctx, key, expected)
	return t.Interface.OptimisticDelete(ctx, key, expected, opts)
}

func (t *tracedWrites) cause(ctx context.Context, key string, expected int64) {
	if traced := telemetry.Traceparent(ctx); traced != "" {
		t.tell(&logv1.TraceContext{Key: key, ExpectedRevision: expected, Traceparent: traced})
	}
}
