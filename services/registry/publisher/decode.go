package publisher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/storage"
)

// handle handles a response of the etcd watch; ok is false if the watch has ended.
func (t *term) handle(ctx context.Context, resp etcdResponse, ok bool) error {
	switch {
	case !ok:
		return errors.New("etcd ended the watch")
	case errors.Is(resp.err, rpctypes.ErrCompacted):
		t.Compacted()
		return nil
	case resp.err != nil:
		return resp.err
	case len(resp.events) == 0:
		etcdmetrics.RecordEtcdBookmark(schema.GroupResource{}) // the watch is of all resources
		t.Progress(resp.revision)
		return nil
	}
	for events := resp.events; len(events) > 0 && t.Request.Op == core.WatchEtcd; {
		n := 1
		for n < len(events) && events[n].Kv.ModRevision == events[0].Kv.ModRevision {
			n++
		}
		if slices.ContainsFunc(events[:n], isEncrypted) { // the open batch does not wait for a KMS
			if err := t.log.Flush(ctx); err != nil {
				return err
			}
		}
		t.transaction(ctx, events[:n])
		if err := t.add(ctx); err != nil {
			return err
		}
		if err := t.log.FlushLater(ctx); err != nil { // because a response may have many events
			return err
		}
		events = events[n:]
	}
	return nil
}

// transaction makes the entries of the events of a revision. An event's span belongs to the trace of its write, if
// the write is traced.
func (t *term) transaction(ctx context.Context, events []*mvccpb.Event) {
	changes := make([]core.Change, len(events))
	for i, e := range events {
		c := &changes[i]
		*c = t.decodeEvent(ctx, e, i)
		switch {
		case c.Err != nil && c.Resource != "" && !errors.Is(c.Err, core.ErrPrevCompacted):
			reject(c.Key, c.Revision, c.Err)
		case c.Err == nil && c.Event != nil:
			span, traced := telemetry.StartEventSpan(ctx, t.traceContexts.pop(e), c.Resource, c.Revision,
				time.Unix(0, c.Event.ObservedUnixNano))
			defer span.End()
			c.Event.Traceparent = traced
		}
	}
	t.Transaction(changes)
}

// encode encodes an event as a message.
func (p *Publisher) encode(e *logv1.Event) (any, error) {
	payload, err := eventlog.Encode(p.NATS.MaxPayload())(e)
	if err != nil {
		reject(e.Namespace+"/"+e.Name, e.Revision, err)
	}
	return payload, err
}

// reject records that an event cannot be published.
func reject(key string, revision int64, err error) {
	rejectedEvents.Inc()
	slog.Error("An event cannot be published; its resource is reset", "key", key, "revision", revision, "error", err)
}

// resourceByKey finds the resource of an etcd key. It is false for a key of a resource that another etcd stores.
func (p *Publisher) resourceByKey(key string) (*storage.Resource, bool) {
	if st, ok := p.Storage.ByKey(key); ok {
		return st, st.Etcd == p.Etcd
	}
	return p.crds.ByKey(key, p.Etcd.Prefix())
}

// keyOf returns the etcd key of an event's object. It is empty for a custom resource whose event is still encrypted,
// and for a built-in resource of another release.
func (p *Publisher) keyOf(e *logv1.Event) string {
	if st, ok := p.Storage.ByName(e.StorageResource); ok {
		return st.Key(e.Namespace, e.Name)
	}
	if e.Object.GetVersion() == "" { // a custom resource has it
		return ""
	}
	return p.Storage.CustomResourceKey(schema.ParseGroupResource(e.StorageResource), e.Namespace, e.Name)
}

// isEncrypted returns true if etcd holds the object before or after an event encrypted.
func isEncrypted(e *mvccpb.Event) bool {
	return storage.Encrypted(e.Kv.Value) || e.PrevKv != nil && storage.Encrypted(e.PrevKv.Value)
}

// decodeEvent decodes an etcd event. index is its position in its revision; an encrypted event is bound to it.
func (p *Publisher) decodeEvent(ctx context.Context, e *mvccpb.Event, index int) (c core.Change) {
	key, deleted := string(e.Kv.Key), e.Type == mvccpb.DELETE
	c.EtcdEvent = core.EtcdEvent{Key: key, Revision: e.Kv.ModRevision, Deleted: deleted}
	st, ok := p.resourceByKey(key)
	if !ok {
		p.checkUnreadable(ctx, e, &c)
		return c
	}
	etcdmetrics.RecordEtcdEvent(st.GroupResource)
	c.Resource, c.Object = st.Name(), strings.TrimPrefix(key, st.Prefix)
	if e.PrevKv != nil {
		c.Previous = e.PrevKv.ModRevision
	}
	defer recovery.ToError("reading an object", &c.Err)
	var obj runtime.Object
	if customresources.IsCRD(st) {
		defer func() { p.applyCRD(&c, obj) }()
	}
	encrypted := isEncrypted(e)
	if encrypted {
		if c.Err = p.decryptBackoff.check(c.Resource); c.Err != nil {
			return c
		}
		defer p.decryptBackoff.record(c.Resource, time.Now(), &c.Err)
	}
	if c.Event, obj, c.Err = p.newLogEvent(ctx, e, st); c.Err != nil && !errors.Is(c.Err, core.ErrPrevCompacted) {
		etcdmetrics.RecordDecodeError(st.GroupResource)
	}
	if c.Event != nil { // readers know a readable object by its own namespace and name
		c.Object = cache.Key(c.Event.Namespace, c.Event.Name)
	}
	if c.Err == nil && encrypted && p.DataKeys != nil {
		c.Event.Index = int32(index)
		c.Err = p.encrypt(ctx, c.Event, st)
	}
	return c
}

// applyCRD applies an event of a CRD. obj is nil if the CRD cannot be decoded.
func (p *Publisher) applyCRD(c *core.Change, obj runtime.Object) {
	switch {
	case obj != nil:
		c.CRDChanged = p.crds.Apply(obj, c.Deleted)
	case !errors.Is(c.Err, core.ErrPrevCompacted):
		c.CRDChanged = p.crds.MarkUnreadable(path.Base(c.Key))
	}
}

// errUnreadableCRD resets the resource of an object whose CRD could not be decoded when the object's event arrived, or
// when an earlier event did.
var errUnreadableCRD = errors.New("its CRD could not be decoded")

// unreadableCRDs is the name for decryptBackoff under which unreadable CRDs are read again.
const unreadableCRDs = "unreadable CRDs"

// checkUnreadable completes the change of an unknown key if the CRD of the key is unreadable: the change resets the
// resource.
func (p *Publisher) checkUnreadable(ctx context.Context, e *mvccpb.Event, c *core.Change) {
	name, object, ok := p.crds.UnreadableByKey(c.Key, p.Etcd.Prefix())
	if !ok {
		return
	}
	err := p.decryptBackoff.check(unreadableCRDs)
	if err == nil {
		var exists bool
		start := time.Now()
		bounded, cancel := context.WithTimeout(ctx, slowDecryption) // other resources' events wait
		exists, err = p.crds.ReadAgain(bounded, name, c.Revision)
		cancel()
		p.decryptBackoff.record(unreadableCRDs, start, &err)
		if !exists {
			return
		}
	}
	c.Resource, c.Object, c.Err = name, object, errUnreadableCRD
	if e.PrevKv != nil {
		c.Previous = e.PrevKv.ModRevision
	}
	if err != nil {
		c.Err = fmt.Errorf("%w: %w", errUnreadableCRD, err)
	}
}

func (p *Publisher) newLogEvent(ctx context.Context, e *mvccpb.Event,
	st *storage.Resource) (*logv1.Event, runtime.Object, error) {
	key := string(e.Kv.Key)
	out := &logv1.Event{Revision: e.Kv.ModRevision, StorageResource: st.Name(), ObservedUnixNano: time.Now().UnixNano()}
	value := e.Kv.Value
	switch {
	case e.Type == mvccpb.DELETE:
		out.Type = logv1.Type_TYPE_DELETED
		if e.PrevKv == nil {
			return nil, nil, core.ErrPrevCompacted
		}
		value = e.PrevKv.Value // the last state, at the revision of the deletion
	case e.Kv.CreateRevision == e.Kv.ModRevision:
		out.Type = logv1.Type_TYPE_ADDED
	default:
		out.Type = logv1.Type_TYPE_MODIFIED
		if e.PrevKv == nil {
			return nil, nil, core.ErrPrevCompacted
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
	mayDiffer := p.selections.record(e, st, out.Object)
	if out.Type != logv1.Type_TYPE_MODIFIED || !mayDiffer {
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
