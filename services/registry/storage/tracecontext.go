package storage

import (
	"context"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"

	"watershed.dev/platform/telemetry"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// PublishTraceContexts makes the client call publish before each write of a traced request. Call it before the first
// write.
func (e *Etcd) PublishTraceContexts(publish func(*logv1.TraceContext)) {
	e.Client.Kubernetes = &tracingClient{e.Client.Kubernetes, publish}
}

// tracingClient is the etcd client of upstream's storage. It publishes trace contexts.
type tracingClient struct {
	etcdkubernetes.Interface
	publish func(*logv1.TraceContext)
}

// OptimisticPut implements kubernetes.Interface of etcd's client.
func (t *tracingClient) OptimisticPut(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (etcdkubernetes.PutResponse, error) {
	t.publishTraceContext(ctx, key, expected)
	return t.Interface.OptimisticPut(ctx, key, value, expected, opts)
}

// OptimisticDelete implements kubernetes.Interface of etcd's client.
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
