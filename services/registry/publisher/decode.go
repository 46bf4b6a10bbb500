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
	defer recovery.ToError("reading an object", &err)
	hidden := storage.Encrypted(e.Kv.Value) || e.PrevKv != nil && storage.Encrypted(e.PrevKv.Value)
	if hidden {
		if err := p.slow.refused(st.Name()); err != nil {
			return nil, "", err
		}
		defer p.slow.note(st.Name(), time.Now(), &err)
	}
	out, obj, err := p.read(ctx, e, st)
	if err == nil && hidden && p.Keys != nil {
		err = p.seal(ctx, out, st)
	}
	if err == nil && customresources.Defines(st) {
		redefined = p.customs.Changed(obj, e.Type == mvccpb.DELETE)
	}
	return out, redefined, err
}

func (p *Publisher) read(ctx context.Context, e *clientv3.Event,
	st *storage.Stored) (*logv1.Event, runtime.Object, error) {
	key := string(e.Kv.Key)
	out := &logv1.Event{Revision: e.Kv.ModRevision, StorageResource: st.Name(), ObservedUnixNano: time.Now().UnixNano()}
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

// seal hides from NATS what etcd has encrypted.
func (p *Publisher) seal(ctx context.Context, e *logv1.Event, st *storage.Stored) error {
	key, secret, err := p.Keys.Current(ctx, st)
	if err != nil {
		return err
	}
	return eventlog.Encrypt(e, key, secret)
}

const (
	// slowAfter is how long the decryption of an event may take in vain until its resource is left alone, and leftAlone
	// for how long: a KMS that hangs takes its timeout for each, and every other resource waits behind it.
	slowAfter = time.Second
	leftAlone = 10 * time.Second
)

// slow are the resources whose events cannot be decrypted and take long to find that out. It is one goroutine's.
type slow map[string]time.Time

// refused is why a resource's events are not decrypted now, or nil.
func (s slow) refused(storedAs string) error {
	if since, ok := s[storedAs]; ok && time.Since(since) < leftAlone {
		return fmt.Errorf("%s could not be decrypted a moment ago, and took long", storedAs)
	}
	return nil
}

func (s *slow) note(storedAs string, began time.Time, err *error) {
	if *err == nil || time.Since(began) < slowAfter {
		delete(*s, storedAs)
		return
	}
	if *s == nil {
		*s = slow{}
	}
	(*s)[storedAs] = time.Now()
}
