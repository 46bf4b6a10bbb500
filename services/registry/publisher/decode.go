package publisher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/storage"
)

// errPrevCompacted says that etcd has compacted what an object was before: who watched it with a selector cannot be told
// whether it left. The log starts anew.
var errPrevCompacted = errors.New("etcd compacted the object's last state")

// resourceByKey finds whose etcd key it is.
func (p *Publisher) resourceByKey(key string) (*storage.Resource, bool) {
	if st, ok := p.Storage.ByKey(key); ok {
		return st, true
	}
	return p.crds.ByKey(key, p.Storage.Prefix())
}

// decodeEvent decodes one etcd event; nil for a key of nothing served. redefined is the stored resource whose objects are
// read in another way after it, since it is its definition's.
func (p *Publisher) decodeEvent(
	ctx context.Context,
	e *clientv3.Event,
) (out *logv1.Event, crdChanged string, err error) {
	key := string(e.Kv.Key)
	st, ok := p.resourceByKey(key)
	if !ok {
		return nil, "", nil
	}
	defer recovery.ToError("reading an object", &err)
	encrypted := storage.Encrypted(e.Kv.Value) || e.PrevKv != nil && storage.Encrypted(e.PrevKv.Value)
	if encrypted {
		if err := p.decryptBackoff.check(st.Name()); err != nil {
			return nil, "", err
		}
		defer p.decryptBackoff.record(st.Name(), time.Now(), &err)
	}
	out, obj, err := p.newLogEvent(ctx, e, st)
	if err == nil && encrypted && p.DataKeys != nil {
		err = p.encrypt(ctx, out, st)
	}
	if err == nil && customresources.IsCRD(st) {
		crdChanged = p.crds.Apply(obj, e.Type == mvccpb.DELETE)
	}
	return out, crdChanged, err
}

func (p *Publisher) newLogEvent(ctx context.Context, e *clientv3.Event,
	st *storage.Resource) (*logv1.Event, runtime.Object, error) {
	key := string(e.Kv.Key)
	out := &logv1.Event{Revision: e.Kv.ModRevision, StorageResource: st.Name(), ObservedUnixNano: time.Now().UnixNano()}
	value := e.Kv.Value
	switch {
	case e.Type == mvccpb.DELETE:
		out.Type = logv1.Type_TYPE_DELETED
		if e.PrevKv == nil {
			return nil, nil, errPrevCompacted
		}
		value = e.PrevKv.Value // its last state, at the revision of the deletion
	case e.IsCreate():
		out.Type = logv1.Type_TYPE_ADDED
	default:
		out.Type = logv1.Type_TYPE_MODIFIED
		if e.PrevKv == nil {
			return nil, nil, errPrevCompacted
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
	changed, err := st.SelectionChanged(old, out.Object)
	if err == nil && changed {
		out.Previous, err = st.Encode(old)
	}
	return out, obj, err
}

// encrypt hides from NATS what etcd has encrypted.
func (p *Publisher) encrypt(ctx context.Context, e *logv1.Event, st *storage.Resource) error {
	key, secret, err := p.DataKeys.Current(ctx, st)
	if err != nil {
		return err
	}
	return eventlog.Encrypt(e, key, secret)
}

const (
	// slowDecryption is how long the decryption of an event may take in vain until its resource is left alone, and decryptBackoffPeriod
	// for how long: a KMS that hangs takes its timeout for each, and every other resource waits behind it.
	slowDecryption       = time.Second
	decryptBackoffPeriod = 10 * time.Second
)

// decryptBackoff are the resources whose events cannot be decrypted and take long to find that out. It is one goroutine's.
type decryptBackoff map[string]time.Time

// check is why a resource's events are not decrypted now, or nil.
func (s decryptBackoff) check(storageResource string) error {
	if since, ok := s[storageResource]; ok && time.Since(since) < decryptBackoffPeriod {
		return fmt.Errorf("%s could not be decrypted a moment ago, and took long", storageResource)
	}
	return nil
}

func (s *decryptBackoff) record(storageResource string, start time.Time, err *error) {
	if *err == nil || time.Since(start) < slowDecryption {
		delete(*s, storageResource)
		return
	}
	if *s == nil {
		*s = decryptBackoff{}
	}
	(*s)[storageResource] = time.Now()
}
