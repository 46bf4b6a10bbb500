package storage

import (
	"context"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"

	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// PublishTraceContexts has tell called before each write of a traced request. It is set before anything is written.
func (s *Storage) PublishTraceContexts(publish func(*logv1.TraceContext)) {
	s.Client.Kubernetes = &tracingClient{s.Client.Kubernetes, publish}
}

// tracingClient is etcd's client as upstream's storage uses it.
type tracingClient struct {
	etcdkubernetes.Interface
	publish func(*logv1.TraceContext)
}

// OptimisticPut implements etcd's client.
func (t *tracingClient) OptimisticPut(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (etcdkubernetes.PutResponse, error) {
	t.publishTraceContext(ctx, key, expected)
	return t.Interface.OptimisticPut(ctx, key, value, expected, opts)
}

// OptimisticDelete implements etcd's client.
func (t *tracingClient) OptimisticDelete(ctx context.Context, key string, expected int64,
	opts etcdkubernetes.DeleteOptions) (etcdkubernetes.DeleteResponse, error) {
	t.publishTraceContext(ctx, key, expected)
	return t.Interface.OptimisticDelete(ctx, key, expected, opts)
}

func (t *tracingClient) publishTraceContext(ctx context.Context, key string, expected int64) {
	if traced := telemetry.Traceparent(ctx); traced != "" {
		t.publish(&logv1.TraceContext{Key: key, ExpectedRevision: expected, Traceparent: traced})
	}
}
