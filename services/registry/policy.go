package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/storage"
)

// policy is what the services that decide read: etcd's own lists, and events from the tail.
type policy struct {
	watchfanoutv1.UnimplementedPolicyServer
	*Service
	draining  chan struct{}
	drainOnce sync.Once
}

func newPolicy(s *Service) *policy { return &policy{Service: s, draining: make(chan struct{})} }

// errObjects is the answer to a list that Objects.List knows how to answer, and to a watch in a form that nobody who decides asks for.
var errObjects = status.Error(codes.FailedPrecondition, "not offered to who decides; ask for objects")

// initialBytes is about how many bytes of initial events are sent at a time.
const initialBytes = 1 << 20

// List answers a whole list as it is in etcd.
func (p *policy) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	ctx := stream.Context()
	v, err := p.view(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	if r.Limit != 0 && r.ResourceVersion != "0" || r.Continue != "" || r.ResourceVersionMatch == "Exact" { // with "0" a limit does not count
		return errObjects
	}
	rows, revision, err := v.rows(ctx, r.ResourceVersion)
	if err != nil {
		return rpc.ToStatus(err)
	}
	items := make([][]byte, len(rows))
	for i, row := range rows {
		if !v.own(row.Version) {
			return errObjects
		}
		if items[i], err = v.item(row.Json, row.Protobuf); err != nil {
			return rpc.ToStatus(err)
		}
	}
	head := &frame.List{Kind: v.entry.ListKind, APIVersion: frame.APIVersion(&commonv1.Kind{Group: v.entry.Resource.Group, Version: v.entry.Resource.Version}),
		Revision: revision, Untyped: v.entry.Untyped && !v.partial}
	if v.partial {
		head.Kind, head.APIVersion = "PartialObjectMetadataList", frame.APIVersion(v.output.As)
	}
	out := &frame.Chunks{Bytes: chunkBytes, Send: func(pieces [][]byte, size int64) error {
		return stream.Send(&watchfanoutv1.ListChunk{Data: pieces, Size: size})
	}}
	if v.protobuf {
		head.Protobuf(out, items)
	} else {
		head.JSON(out, items, v.itemHead())
	}
	return out.End()
}

// view is what is asked for, and in which form.
type view struct {
	*policy
	entry   *registryv1.ResourceEntry
	output  *registryv1.Output
	stored  *storage.Stored
	selects selector
	// prefix is where in etcd all that is selected lies.
	prefix            string
	protobuf, partial bool
	// skips: what cannot be read is left out in place of the whole being refused.
	skips         bool
	kind, version string // of an object in a watch
	native        bool   // the log's encodings are in the version asked for
}

func (p *policy) view(ctx context.Context, q *watchfanoutv1.Query) (*view, error) {
	e, err := p.endpoint(ctx, q.GetEntry().GetResource())
	if err != nil {
		return nil, err
	}
	v := &view{policy: p, entry: e.Entry, output: q.GetOutput(), skips: q.GetSkipUnreadable()}
	if v.entry.GetStoredAs() == "" {
		return nil, errObjects
	}
	v.kind, v.version = v.entry.Kind.Kind, frame.APIVersion(v.entry.Kind)
	switch as := v.output.GetAs(); as.GetKind() {
	case "":
	case "PartialObjectMetadata", "PartialObjectMetadataList":
		v.partial, v.kind, v.version = true, "PartialObjectMetadata", frame.APIVersion(as)
	default:
		return nil, errObjects
	}
	switch v.output.GetMediaType() {
	case frame.JSON:
	case frame.Protobuf:
		v.protobuf = true
	default:
		return nil, errObjects
	}
	k, stored := v.entry.Kind, v.entry.StoredKind
	v.native = k.Group == stored.Group && k.Version == stored.Version && k.Kind == stored.Kind
	if v.stored, err = p.Service.stored(ctx, v.entry.StoredAs); err != nil {
		return nil, err
	}
	namespace := ""
	if v.entry.Namespaced {
		namespace = q.GetNamespace()
	}
	v.prefix = v.stored.Prefix
	if namespace != "" {
		v.prefix += namespace + "/"
	}
	v.selects, err = v.selector(namespace, q.GetLabelSelector(), q.GetFieldSelector())
	return v, err
}

func (v *view) selector(namespace, labelSelector, fieldSelector string) (selector, error) {
	ls, err := labels.Parse(labelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	fs, err := fields.ParseSelector(fieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if v.entry.ConvertedFields {
		for _, r := range fs.Requirements() {
			if !strings.HasPrefix(r.Field, "metadata.") {
				return nil, errObjects // only converting an object can tell
			}
		}
	}
	return selecting(namespace, ls, fs), nil
}

// own says whether the log's encodings of an object are what is asked for. version is the one that an object of a custom resource is in.
func (v *view) own(version string) bool {
	switch {
	case v.partial: // metadata is the same in every version
		return true
	case v.entry.Untyped:
		return version == v.entry.Kind.Version && !v.protobuf
	}
	return v.native
}

// item is an object as a list has it.
func (v *view) item(body, message []byte) ([]byte, error) {
	switch {
	case v.partial && v.protobuf:
		return frame.MetadataProtobuf(message)
	case v.partial:
		m, err := frame.MetadataJSON(body)
		if err != nil {
			return nil, err
		}
		return frame.Object(nil, v.kind, v.version, append(append([]byte{'{'}, m...), '}')), nil
	case v.protobuf:
		return message, nil
	}
	return body, nil
}

func (v *view) itemHead() []byte {
	if !v.entry.Untyped || v.partial {
		return nil
	}
	return fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q,`, v.version, v.kind)
}

// rows are the objects that are selected, as etcd has them now, at a revision that is not older than resourceVersion.
func (v *view) rows(ctx context.Context, resourceVersion string) ([]*registryv1.Row, int64, error) {
	least := int64(0)
	if resourceVersion != "" {
		var err error
		if least, err = strconv.ParseInt(resourceVersion, 10, 64); err != nil {
			return nil, 0, errObjects // which knows in which words that is refused
		}
	}
	revision, err := v.readRevision(ctx)
	if err != nil {
		return nil, 0, err
	}
	if least > revision {
		return nil, 0, errObjects
	}
	var out []*registryv1.Row
	err = v.pages(ctx, v.prefix, revision, func(kvs []*mvccpb.KeyValue) error {
		for _, row := range rowsOf(ctx, v.stored, kvs) {
			switch {
			case row.Unreadable == "":
				if v.selects(row.Namespace, &logv1.Object{Labels: row.Labels, Fields: row.Fields}) {
					out = append(out, row)
				}
			case !v.skips:
				return apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s", row.Namespace+"/"+row.Name, row.Unreadable))
			}
		}
		return nil
	})
	return out, revision, err
}

// policyPeriod is how often a watch says how far it has come.
const policyPeriod = time.Second

// Watch streams events of the tail. What is no longer there has expired, and is listed.
func (p *policy) Watch(r *watchfanoutv1.WatchRequest, stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	ctx := stream.Context()
	v, err := p.view(ctx, r.Query)
	if err != nil {
		return rpc.ToStatus(err)
	}
	w := &policyWatch{view: v, request: r, stream: stream}
	if err = w.begin(ctx); err == nil {
		err = w.run(ctx)
	}
	if errors.Is(err, errOverrun) {
		err = apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d", w.position.Revision))
	}
	return rpc.ToStatus(w.fail(err))
}

type policyWatch struct {
	*view
	request  *watchfanoutv1.WatchRequest
	stream   grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	position watchfanoutv1.Position
}

// begin finds where the watch goes on from, and sends the objects that come before.
func (w *policyWatch) begin(ctx context.Context) error {
	r := w.request
	_, history := w.tail.at()
	w.position.History, w.position.Index = history, wholly
	initial := r.ResourceVersion == "" || r.ResourceVersion == "0"
	if r.SendInitialEvents != nil {
		initial = *r.SendInitialEvents
	}
	var err error
	switch {
	case r.ResumeAfter != nil && (!initial || r.InitialEventsDone):
		w.position.Revision, w.position.Index = r.ResumeAfter.Revision, r.ResumeAfter.Index
		if h := r.ResumeAfter.History; h != "" && history != "" && h != history {
			return errOverrun
		}
	case initial:
		return w.initial(ctx)
	case r.ResourceVersion == "" || r.ResourceVersion == "0":
		w.position.Revision, err = w.currentRevision(ctx)
	default:
		if w.position.Revision, err = strconv.ParseInt(r.ResourceVersion, 10, 64); err != nil {
			return apierrors.NewBadRequest("invalid resource version: " + r.ResourceVersion)
		}
	}
	if err != nil {
		return err
	}
	if high, _ := w.tail.at(); w.position.Revision > high { // it is of another history where etcd has not come to it
		if now, err := w.currentRevision(ctx); err == nil && w.position.Revision > now {
			return errOverrun
		}
		return nil
	}
	return w.send(nil, nil) // the stream is open, and can be resumed from here
}

// initial sends every object as ADDED.
func (w *policyWatch) initial(ctx context.Context) error {
	rows, revision, err := w.rows(ctx, w.request.ResourceVersion)
	if err != nil {
		return err
	}
	var pieces [][]byte
	bytes := 0
	for _, row := range rows {
		data, err := w.frame(ctx, "ADDED", &logv1.Object{Json: row.Json, Protobuf: row.Protobuf, Version: row.Version})
		if err != nil {
			return err
		}
		pieces, bytes = append(pieces, data), bytes+len(data)
		if bytes > initialBytes {
			if err := w.stream.Send(&watchfanoutv1.WatchFrame{Initial: pieces}); err != nil {
				return err
			}
			pieces, bytes = nil, 0
		}
	}
	w.position.Revision = revision
	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {
		pieces = append(pieces, w.bookmark(true))
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Initial: pieces, InitialEventsDone: true, Position: w.at()})
}

func (w *policyWatch) run(ctx context.Context) error {
	tail := w.tail.follow(w.entry.StoredAs, w.position.Revision, w.position.Index)
	period := time.NewTicker(policyPeriod)
	defer period.Stop()
	for due := false; ; {
		events, high, changed, overrun := tail.read()
		if err := w.deliver(ctx, events); err != nil {
			return err
		}
		if overrun != nil {
			return overrun
		}
		if due && high > w.position.Revision {
			due = false
			w.position.Revision, w.position.Index = high, wholly
			var err error
			if w.request.AllowBookmarks {
				err = w.send(w.bookmark(false), []*watchfanoutv1.Mark{{Bookmark: true}})
			} else { // the gateway alone is told how far the stream has come
				err = w.send(nil, nil)
			}
			if err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-w.draining:
			return status.Error(codes.Unavailable, "the registry is draining")
		case <-period.C:
			due = true
			w.askProgress(ctx)
		}
	}
}

// askProgress has the publisher say how far it is, where etcd has gone on by what is in no log.
func (p *policy) askProgress(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, policyPeriod)
	defer cancel()
	now, err := p.currentRevision(ctx)
	if high, _ := p.tail.at(); err == nil && high < now {
		_ = p.nats.Publish(eventlog.AskProgress, nil)
	}
}

func (w *policyWatch) deliver(ctx context.Context, events []*logv1.Event) error {
	var data []byte
	var marks []*watchfanoutv1.Mark
	for _, e := range events {
		kind, obj := seen(e, w.selects)
		if kind == "" {
			continue
		}
		f, err := w.frame(ctx, kind, obj)
		if err != nil {
			return err
		}
		w.position.Revision, w.position.Index = e.Revision, e.Index
		data = append(data, f...)
		marks = append(marks, &watchfanoutv1.Mark{End: int32(len(data)), Position: w.at(), Trace: e.Trace})
		if len(data) > initialBytes {
			if err := w.send(data, marks); err != nil {
				return err
			}
			data, marks = nil, nil
		}
	}
	if len(marks) == 0 {
		return nil
	}
	return w.send(data, marks)
}

func (w *policyWatch) at() *watchfanoutv1.Position {
	return &watchfanoutv1.Position{Revision: w.position.Revision, Index: w.position.Index, History: w.position.History}
}

// send sends frames that end at the watch's position; a mark without a place is of all of data.
func (w *policyWatch) send(data []byte, marks []*watchfanoutv1.Mark) error {
	for _, m := range marks {
		if m.Position == nil {
			m.Position, m.End = w.at(), int32(len(data))
		}
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, Marks: marks, Position: w.at()})
}

// frame is one event.
func (v *view) frame(ctx context.Context, event string, o *logv1.Object) ([]byte, error) {
	body, message := o.Json, o.Protobuf
	var err error
	switch {
	case v.partial && v.protobuf:
		message, err = frame.MetadataProtobuf(message)
	case v.partial:
		var m []byte
		m, err = frame.MetadataJSON(body)
		body = append(append([]byte{'{'}, m...), '}')
	case !v.own(o.Version):
		r := &registryv1.EncodeRequest{StoredAs: v.entry.StoredAs, Resource: v.entry.Resource, Output: v.output, Json: [][]byte{o.Json}, Versions: []string{o.Version}}
		if !v.entry.Untyped {
			r.Protobuf = [][]byte{o.Protobuf}
		}
		var resp *registryv1.EncodeResponse
		if resp, err = v.Encode(ctx, r); err == nil {
			body, message = resp.Objects[0], resp.Objects[0]
		}
	}
	if err != nil {
		return nil, err
	}
	if v.protobuf {
		return frame.WatchProtobuf(event, frame.Envelope(v.kind, v.version, message)), nil
	}
	return frame.WatchJSON(event, frame.Object(nil, v.kind, v.version, body)), nil
}

func (w *policyWatch) bookmark(initialEnd bool) []byte {
	if w.protobuf {
		return frame.WatchProtobuf("BOOKMARK", frame.Envelope(w.kind, w.version, frame.BookmarkProtobuf(w.position.Revision, initialEnd)))
	}
	m := append(append([]byte{'{'}, frame.BookmarkMeta(w.position.Revision, initialEnd)...), '}')
	return frame.WatchJSON("BOOKMARK", frame.Object(nil, w.kind, w.version, m))
}

// fail ends the stream with an ERROR event where the error is the API's own, for the client to see.
func (w *policyWatch) fail(err error) error {
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	st := api.Status()
	st.Kind, st.APIVersion = "Status", "v1"
	var data []byte
	if w.protobuf {
		message, merr := st.Marshal()
		if merr != nil {
			return merr
		}
		data = frame.WatchProtobuf("ERROR", frame.Envelope("Status", "v1", message))
	} else {
		body, merr := json.Marshal(st)
		if merr != nil {
			return merr
		}
		data = frame.WatchJSON("ERROR", body)
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true})
}

// Drain ends every watch, so that the gateways resume them on another registry.
func (p *policy) Drain() { p.drainOnce.Do(func() { close(p.draining) }) }
