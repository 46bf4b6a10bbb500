package routing

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/watch"
	"watershed.dev/services/gateway/wire"
)

// errRegistry says that registry must answer: the watch tier cannot, or the options are bad and registry knows in which
// words.
var errRegistry = errors.New("ask registry")

// options reads a list's or watch's options for the watch tier.
func (c *call) options() (*internalversion.ListOptions, *watchfanoutv1.Query, error) {
	opts := &internalversion.ListOptions{}
	if c.req.URL.RawQuery != "" {
		if err := metainternalversionscheme.ParameterCodec.DecodeParameters(c.req.URL.Query(), metav1.SchemeGroupVersion, opts); err != nil {
			return nil, nil, errRegistry
		}
	}
	internalversion.SetListOptionsDefaults(opts, true)
	if errs := metainternalversionvalidation.ValidateListOptions(opts, true); len(errs) > 0 {
		return nil, nil, errRegistry
	}
	if c.entry.StoredAs == "" || c.entry.Resource.Subresource != "" || len(content.IsPathSegmentName(c.namespace())) > 0 {
		return nil, nil, errRegistry
	}
	q := &watchfanoutv1.Query{Entry: c.entry, Namespace: c.namespace(), Output: c.out, SkipUnreadable: c.skips()}
	if opts.LabelSelector != nil {
		q.LabelSelector = opts.LabelSelector.String()
	}
	selector := fields.Everything()
	if opts.FieldSelector != nil {
		var err error
		selector, err = opts.FieldSelector.Transform(func(label, value string) (string, string, error) {
			to, ok := c.entry.SelectableFields[label]
			if !ok {
				return "", "", errRegistry
			}
			return to, value, nil
		})
		if err != nil {
			return nil, nil, errRegistry
		}
	}
	if c.info.Name != "" { // a watch of one object
		if name, ok := selector.RequiresExactMatch("metadata.name"); !selector.Empty() && (!ok || name != c.info.Name) {
			return nil, nil, errRegistry
		}
		if selector.Empty() {
			selector = fields.OneTermEqualSelector("metadata.name", c.info.Name)
		}
	}
	q.FieldSelector = selector.String()
	if c.out.GetAs().GetKind() == "Table" {
		q.IncludeObject = c.req.URL.Query().Get("includeObject")
		switch metav1.IncludeObjectPolicy(q.IncludeObject) {
		case "", metav1.IncludeNone, metav1.IncludeMetadata, metav1.IncludeObject:
		default:
			return nil, nil, errRegistry
		}
	}
	return opts, q, nil
}

// decides says whether who asks decides by the answer: authn, authz and admission. They are answered by registry, so
// that a replica of the watch tier can neither make a permission up nor keep one that was taken away.
func (c *call) decides() bool { return slices.Contains(c.user.GetGroups(), identity.ServicesGroup) }

// lister answers lists from encoded bytes.
type lister interface {
	List(context.Context, *watchfanoutv1.ListRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.ListChunk], error)
}

// source is what answers the request's lists and fills its watches.
func (c *call) source() (lister, *watch.Hub) {
	if c.decides() {
		return c.Policy, c.PolicyWatches
	}
	return c.Tier, c.Watches
}

// skips says whether what cannot be read is left out of a list. It is for the services that decide by it: an unreadable
// role grants nothing, and is no reason not to hear of the others. An unreadable webhook or policy might refuse, so of
// those they are refused the list, and in time decide nothing.
func (c *call) skips() bool {
	return c.entry.Resource.GetGroup() != "admissionregistration.k8s.io" && c.decides()
}

// answersWithin is how long the watch tier may be silent before registry is asked in its place: a replica may be there,
// and yet not move.
const answersWithin = 5 * time.Second

// getFromTier reads one object, as it is stored, from the watch tier's bytes. Anything else is registry's to answer.
func (c *call) getFromTier() ([]byte, bool) {
	if !c.TierGets || c.decides() || c.entry.StoredAs == "" || c.entry.Resource.Subresource != "" || c.out.As != nil || c.out.Pretty || !c.has("watch") ||
		c.out.MediaType != runtime.ContentTypeJSON && c.out.MediaType != runtime.ContentTypeProtobuf {
		return nil, false
	}
	version := ""
	switch c.req.URL.RawQuery {
	case "":
	case "resourceVersion=0":
		version = "0"
	default:
		return nil, false
	}
	ctx, cancel := context.WithTimeout(c.req.Context(), answersWithin)
	defer cancel()
	resp, err := c.Tier.Get(rpc.Routed(ctx, c.entry.StoredAs), &watchfanoutv1.GetRequest{
		Query: &watchfanoutv1.Query{Entry: c.entry, Namespace: c.namespace(), Output: c.out}, Name: c.info.Name, ResourceVersion: version}, grpc.WaitForReady(false))
	return resp.GetBody(), err == nil
}

func (c *call) list() {
	opts, q, err := c.options()
	if err != nil || c.out.Pretty || c.out.MediaType != runtime.ContentTypeJSON && c.out.MediaType != runtime.ContentTypeProtobuf ||
		c.out.GetAs().GetKind() == "PartialObjectMetadata" {
		c.listFromRegistry()
		return
	}
	ctx := c.req.Context()
	listing, cancel := context.WithCancel(ctx)
	defer cancel()
	silent := time.AfterFunc(answersWithin, cancel)
	if c.decides() && !ofOne(q) { // nobody else is to be asked; of one object another registry may be, where this one hangs
		silent.Stop()
	}
	source, _ := c.source()
	stream, err := source.List(rpc.Routed(listing, c.entry.StoredAs), &watchfanoutv1.ListRequest{Query: q, ResourceVersion: opts.ResourceVersion,
		ResourceVersionMatch: string(opts.ResourceVersionMatch), Limit: opts.Limit, Continue: opts.Continue}, grpc.WaitForReady(false))
	var first *watchfanoutv1.ListChunk
	if err == nil {
		first, err = stream.Recv()
	}
	silent.Stop()
	if err != nil {
		switch code := status.Code(err); {
		case code == codes.FailedPrecondition, code == codes.Unavailable, code == codes.Unimplemented, code == codes.Canceled && ctx.Err() == nil, // not held there, or nobody there
			(code == codes.ResourceExhausted || code == codes.Internal) && len(status.Convert(err).Details()) == 0: // or gRPC itself could not carry it
			c.listFromRegistry()
		default:
			c.fail(rpc.FromStatus(err))
		}
		return
	}
	write, end := c.body(first.Size)
	for chunk := first; ; {
		if err := write(chunk.Data); err != nil {
			panic(http.ErrAbortHandler) // as below
		}
		if chunk, err = stream.Recv(); err != nil {
			if !errors.Is(err, io.EOF) {
				panic(http.ErrAbortHandler) // the client must not take half a list for a whole one
			}
			end()
			return
		}
	}
}

// ofOne says whether a query is of one object.
func ofOne(q *watchfanoutv1.Query) bool {
	if q.Entry.Namespaced && q.Namespace == "" {
		return false
	}
	selector, err := fields.ParseSelector(q.FieldSelector)
	if err != nil {
		return false
	}
	_, ok := selector.RequiresExactMatch("metadata.name")
	return ok
}

// directAbove is the size from which a body is written past the HTTP/2 server, which copies and frames it piece by
// piece.
const directAbove = 64 << 10

// body begins an answer of some size and answers how to write it and how to end it.
func (c *call) body(size int64) (write func([][]byte) error, end func()) {
	ctx := c.req.Context()
	if stream := wire.Of(c.req); stream != nil && size > directAbove && !(size > gzipAbove && acceptsGzip(c.req)) {
		c.w.Header().Set("Content-Type", c.contentType())
		c.w.WriteHeader(http.StatusOK)
		if http.NewResponseController(c.w).Flush() == nil && stream.Take(ctx, 0) {
			return func(parts [][]byte) error { return stream.Write(ctx, c.Watches.Config.WriteTimeout, parts...) }, func() { _ = stream.Finish(ctx) }
		}
	}
	b := newBody(c.w, c.req, c.contentType(), http.StatusOK, size)
	return func(parts [][]byte) error {
		for _, p := range parts {
			if _, err := b.Write(p); err != nil {
				return err
			}
		}
		return nil
	}, func() { _ = b.Close() }
}

// listFromRegistry answers a list that the watch tier does not. Many who ask the same at once, as all do when the tier
// is away, share one reading of etcd that began after they asked.
func (c *call) listFromRegistry() {
	r := c.read()
	r.User, r.Query = nil, listQuery(c.req.URL.Query()) // a list is the same for whoever may see it
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		c.fail(err)
		return
	}
	r.User, r.Query = c.user, c.req.URL.RawQuery
	lists := c.Lists
	if slices.ContainsFunc(c.user.GetGroups(), func(g string) bool { return slices.Contains(first, g) }) {
		lists = c.FirstLists
	}
	data, err := lists.GetFor(c.req.Context(), identity.Owner(c.user.GetName()), string(key), func(ctx context.Context) ([]byte, error) { return c.readList(ctx, r) })
	if errors.Is(err, coalesce.ErrBusy) {
		err = apierrors.NewTooManyRequests("too many lists are waiting for etcd, please try again later", 1)
	}
	if err != nil {
		c.fail(rpc.FromStatus(err))
		return
	}
	c.respond(&registryv1.ObjectResponse{Code: http.StatusOK, Body: data})
}

// first are the groups whose lists do not wait for everybody's: what decides, what administers, and nodes.
var first = []string{identity.ServicesGroup, user.SystemPrivilegedGroup, user.NodesGroup}

// listQuery is a query without what no list depends on, in one order.
func listQuery(q url.Values) string {
	for k := range q {
		switch k {
		case "labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "resourceVersionMatch", "timeoutSeconds", "includeObject", "watch",
			"allowWatchBookmarks", "sendInitialEvents", "shardSelector":
		default:
			delete(q, k)
		}
	}
	return q.Encode()
}

func (c *call) readList(ctx context.Context, r *registryv1.GetRequest) (data []byte, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Objects.List(ctx, r)
	for err == nil {
		var chunk *registryv1.ListChunk
		if chunk, err = stream.Recv(); err == nil {
			data = append(data, chunk.Data...)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return data, nil
}

// watch keeps a client's stream open, over the loss of any number of replicas.
func (c *call) watch() {
	opts, q, err := c.options()
	if err != nil {
		c.refuseWatch()
		return
	}
	version, err := watchVersion(opts.ResourceVersion)
	if err != nil {
		c.fail(err)
		return
	}
	if c.out.MediaType != runtime.ContentTypeJSON && c.out.MediaType != runtime.ContentTypeProtobuf {
		var streams []string
		for _, m := range c.serializers() {
			if m.StreamSerializer != nil {
				streams = append(streams, m.MediaType+";stream=watch")
			}
		}
		c.fail(negotiation.NewNotAcceptableError(streams))
		return
	}
	_, hub := c.source()
	bookmarks := hub.Config.BookmarkPeriod
	if c.decides() { // they measure by them how fresh they are
		bookmarks = 0
	}
	timeout := time.Duration(float64(c.MinRequestTimeout) * (rand.Float64() + 1))
	if opts.TimeoutSeconds != nil && *opts.TimeoutSeconds != 0 { // a negative one is over at once
		timeout = time.Duration(*opts.TimeoutSeconds) * time.Second
	}
	r := &watch.Request{WatchRequest: &watchfanoutv1.WatchRequest{Query: q, ResourceVersion: version, ResourceVersionMatch: string(opts.ResourceVersionMatch),
		AllowBookmarks: opts.AllowWatchBookmarks, SendInitialEvents: opts.SendInitialEvents},
		Deadline: time.Now().Add(timeout), BookmarkPeriod: bookmarks, Stopping: c.Stopping(), Moved: func() <-chan struct{} { return c.Authorize.Moved(c.namespace()) }, Allowed: c.stillAllowed()}
	metrics.RecordLongRunning(c.req, c.info, metrics.APIServerComponent, func() {
		if wsstream.IsWebSocketRequest(c.req) {
			c.overWebSocket(hub, r)
			return
		}
		hub.Serve(c.req.Context(), r, &httpSink{call: c, control: http.NewResponseController(c.w)})
	})
}

// watchVersion reads a watch's resourceVersion as kube-apiserver does, with its error: a number of 64 bits, however
// written.
func watchVersion(v string) (string, error) {
	if v == "" {
		return "", nil
	}
	n, err := storage.APIObjectVersioner{}.ParseResourceVersion(v)
	return strconv.FormatUint(min(n, math.MaxInt64), 10), err
}

// stillAllowed asks again what the authorization filter asked.
func (c *call) stillAllowed() func(context.Context) bool {
	attrs, err := filters.GetAuthorizerAttributes(c.req.Context())
	return func(ctx context.Context) bool { return err == nil && c.Authorize.Still(ctx, attrs) }
}

// refuseWatch answers bad options in registry's words.
func (c *call) refuseWatch() {
	r := c.read()
	r.Output = &registryv1.Output{MediaType: runtime.ContentTypeJSON, As: c.out.As}
	stream, err := c.Objects.List(c.req.Context(), r)
	if err == nil {
		_, err = stream.Recv()
	}
	if err == nil {
		err = apierrors.NewMethodNotSupported(c.groupResource(), "watch")
	}
	c.fail(rpc.FromStatus(err))
}

// httpSink writes frames as a body without end.
type httpSink struct {
	*call
	control *http.ResponseController
	written int64
}

func (s *httpSink) Open() {
	t := s.out.MediaType
	if t != runtime.ContentTypeJSON {
		t += ";stream=watch"
	}
	s.w.Header().Set("Content-Type", t)
	s.w.Header().Set("Transfer-Encoding", "chunked")
	s.w.WriteHeader(http.StatusOK)
	_ = s.control.Flush()
}

func (s *httpSink) Write(ctx context.Context, frames ...[]byte) error {
	if until, ok := ctx.Deadline(); ok {
		_ = s.control.SetWriteDeadline(until)
		defer func() { _ = s.control.SetWriteDeadline(time.Time{}) }()
	}
	for _, f := range frames {
		n, err := s.w.Write(f)
		s.written += int64(n)
		if err != nil {
			return err
		}
	}
	return s.control.Flush()
}

func (s *httpSink) Fail(err error) { s.fail(err) }

// Take implements watch.Sink.
func (s *httpSink) Take(ctx context.Context) *wire.Stream {
	if stream := wire.Of(s.req); stream != nil && stream.Take(ctx, s.written) {
		return stream
	}
	return nil
}

// overWebSocket sends each event as one message.
func (c *call) overWebSocket(hub *watch.Hub, r *watch.Request) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	c.w.Header().Set("Content-Type", c.out.MediaType)
	handler := websocket.Handler(func(ws *websocket.Conn) {
		defer ws.Close()
		go func() { // a client that closes ends the watch
			defer cancel()
			_, _ = io.Copy(io.Discard, ws)
		}()
		hub.Serve(ctx, r, &socketSink{ws, c.out.MediaType == runtime.ContentTypeProtobuf})
	})
	handler.ServeHTTP(c.w, c.req)
}

type socketSink struct {
	ws     *websocket.Conn
	binary bool
}

func (s *socketSink) Open()                             {}
func (s *socketSink) Fail(error)                        {}
func (s *socketSink) Take(context.Context) *wire.Stream { return nil }

func (s *socketSink) Write(ctx context.Context, frames ...[]byte) error {
	until, _ := ctx.Deadline()
	_ = s.ws.SetWriteDeadline(until)
	for _, f := range frames {
		for len(f) > 0 {
			one, rest, err := s.split(f)
			if err != nil {
				return err
			}
			if err := websocket.Message.Send(s.ws, one); err != nil {
				return err
			}
			f = rest
		}
	}
	return nil
}

// split takes one event off: a message is a binary one as it is, or text.
func (s *socketSink) split(frames []byte) (one any, rest []byte, err error) {
	if !s.binary {
		line, rest, _ := bytes.Cut(frames, []byte{'\n'})
		return string(line) + "\n", rest, nil
	}
	if len(frames) < 4 {
		return nil, nil, errors.New("a frame is cut short")
	}
	n := 4 + int(binary.BigEndian.Uint32(frames))
	if n > len(frames) {
		return nil, nil, errors.New("a frame is cut short")
	}
	return frames[4:n], frames[n:], nil
}
