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

// errPrevCompacted means that etcd has compacted the previous state of an object. A watch with a selector then cannot
// see whether the object left the selection, so the log is reset.
var errPrevCompacted = errors.New("etcd compacted the object's previous state")

// resourceByKey finds the resource of an etcd key.
func (p *Publisher) resourceByKey(key string) (*storage.Resource, bool) {
	if st, ok := p.Storage.ByKey(key); ok {
		return st, true
	}
	return p.crds.ByKey(key, p.Storage.Prefix())
}

// decodeEvent decodes an etcd event. It returns nil if no served resource has the key. If the event is of a CRD,
// crdChanged is the stored resource whose objects decode differently after it.
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
		value = e.PrevKv.Value // the last state, at the revision of the deletion
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

// encrypt encrypts an event whose object is encrypted in etcd, so that NATS does not hold it in plain text.
func (p *Publisher) encrypt(ctx context.Context, e *logv1.Event, st *storage.Resource) error {
	key, secret, err := p.DataKeys.Current(ctx, st)
	if err != nil {
		return err
	}
	return eventlog.Encrypt(e, key, secret)
}

const (
	// slowDecryption is how long a failing decryption may take before its resource is skipped for decryptBackoffPeriod.
	// A KMS that hangs delays each event by its timeout, and the events of all resources wait.
	slowDecryption       = time.Second
	decryptBackoffPeriod = 10 * time.Second
)

// decryptBackoff holds the resources whose events failed to decrypt slowly, with the time of the failure. It is used by
// one goroutine.
type decryptBackoff map[string]time.Time

// check returns an error while events of a resource are not decrypted.
func (s decryptBackoff) check(storageResource string) error {
	if since, ok := s[storageResource]; ok && time.Since(since) < decryptBackoffPeriod {
		return fmt.Errorf("%s: a recent decryption failed, and was slow", storageResource)
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
