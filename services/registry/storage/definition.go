package storage

import (
	"context"
	"errors"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
)

// Definition is the CRD under which a request writes custom resources: its key in etcd, and its revision. It is for a
// single request. CRDs and custom resources are in the same etcd, because no override names them (CheckOverrides).
type Definition struct {
	Key      string
	Revision int64
	// decided: a transaction of the request has compared the revision, or has deleted the object.
	decided atomic.Bool
}

// ErrDefinitionChanged is the error of a write under a Definition that etcd has at another revision. Nothing is stored:
// the object was validated, pruned and converted by an older definition, and a new field of it would be lost.
var ErrDefinitionChanged = errors.New("the CustomResourceDefinition has changed")

type definitionKey struct{}

// WithDefinition returns a context whose writes fail with ErrDefinitionChanged unless etcd has the definition. That
// includes a deletion's writes of finalizers and grace periods, and not the deletion itself.
func WithDefinition(ctx context.Context, d *Definition) context.Context {
	return context.WithValue(ctx, definitionKey{}, d)
}

// Confirm returns ErrDefinitionChanged if etcd has the definition at another revision. It reads etcd only if the
// request has had no transaction: an update that changes nothing is not stored. Without a field that an older
// definition prunes, an update may seem to change nothing.
func (d *Definition) Confirm(ctx context.Context, client *clientv3.Client) error {
	if d.decided.Load() {
		return nil
	}
	resp, err := client.Get(ctx, d.Key, clientv3.WithKeysOnly())
	if err == nil && (len(resp.Kvs) == 0 || resp.Kvs[0].ModRevision != d.Revision) {
		err = ErrDefinitionChanged
	}
	return err
}

// put is etcd's OptimisticPut. If the context has a definition, the transaction compares the revisions of both keys.
func (r *cachingClient) put(ctx context.Context, key string, value []byte, expected int64,
	opts etcdkubernetes.PutOptions) (resp etcdkubernetes.PutResponse, err error) {
	d, ok := ctx.Value(definitionKey{}).(*Definition)
	if !ok {
		return r.Interface.OptimisticPut(ctx, key, value, expected, opts)
	}
	txn, err := r.kv.Txn(ctx).If(
		clientv3.Compare(clientv3.ModRevision(key), "=", expected),
		clientv3.Compare(clientv3.ModRevision(d.Key), "=", d.Revision),
	).Then(
		clientv3.OpPut(key, string(value), clientv3.WithLease(opts.LeaseID)),
	).Else(
		clientv3.OpGet(key),
		clientv3.OpGet(d.Key, clientv3.WithKeysOnly()),
	).Commit()
	if err != nil {
		return resp, err
	}
	resp.Succeeded, resp.Revision = txn.Succeeded, txn.Header.Revision
	if txn.Succeeded {
		d.decided.Store(true)
		return resp, nil
	}
	definition := txn.Responses[1].GetResponseRange().Kvs
	if len(definition) == 0 || definition[0].ModRevision != d.Revision {
		return resp, ErrDefinitionChanged
	}
	if kvs := txn.Responses[0].GetResponseRange().Kvs; opts.GetOnFailure && len(kvs) > 0 {
		resp.KV = kvs[0]
	}
	return resp, nil
}
