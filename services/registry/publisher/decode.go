package publisher

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/platform/guard"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/storage"
)

// errUnknownPast says that etcd has compacted what an object was before: who watched it with a selector cannot be told
// whether it left. The log starts anew.
var errUnknownPast = errors.New("etcd compacted the object's last state")

// storedAt finds whose etcd key it is.
func (p *Publisher) storedAt(key string) (*storage.Stored, bool) {
	if st, ok := p.Storage.ByKey(key); ok {
		return st, true
	}
	return p.customs.ByKey(key, p.Storage.Prefix())
}

// event decodes one etcd event; nil for a key of nothing served. redefined is the stored resource whose objects are
// read in another way after it, since it is its definition's.
func (p *Publisher) event(ctx context.Context, e *clientv3.Event) (out *logv1.Event, redefined string, err error) {
	key := string(e.Kv.Key)
	st, ok := p.storedAt(key)
	if !ok {
		return nil, "", nil
	}
	defer guard.Error("reading an object", &err)
	out, obj, err := p.read(ctx, e, st)
	if err == nil && customresources.Defines(st) {
		redefined = p.customs.Changed(obj, e.Type == mvccpb.DELETE)
	}
	return out, redefined, err
}

func (p *Publisher) read(ctx context.Context, e *clientv3.Event,
	st *storage.Stored) (*logv1.Event, runtime.Object, error) {
	key := string(e.Kv.Key)
	out := &logv1.Event{Revision: e.Kv.ModRevision, StoredAs: st.Name(), ObservedUnixNano: time.Now().UnixNano()}
	value := e.Kv.Value
	switch {
	case e.Type == mvccpb.DELETE:
		out.Type = logv1.Type_TYPE_DELETED
		if e.PrevKv == nil {
			return nil, nil, errUnknownPast
		}
		value = e.PrevKv.Value // its last state, at the revision of the deletion
	case e.IsCreate():
		out.Type = logv1.Type_TYPE_ADDED
	default:
		out.Type = logv1.Type_TYPE_MODIFIED
		if e.PrevKv == nil {
			return nil, nil, errUnknownPast
		}
	}
	obj, err := st.Decode(ctx, key, value, e.Kv.ModRevision)
	if err != nil {
		return nil, nil, err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, nil, err
	}
	out.Namespace, out.Name = m.GetNamespace(), m.GetName()
	if out.Object, err = st.Encode(obj); err != nil {
		return nil, nil, err
	}
	if out.Type != logv1.Type_TYPE_MODIFIED {
		return out, obj, nil
	}
	old, err := st.Decode(ctx, key, e.PrevKv.Value, e.Kv.ModRevision)
	if err != nil {
		return nil, nil, err
	}
	changed, err := st.Changed(old, out.Object)
	if err == nil && changed {
		out.Previous, err = st.Encode(old)
	}
	return out, obj, err
}
