package routing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// errRegistry says that registry must answer: the watch tier cannot, or the options are bad and registry knows in which words.
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
	if c.entry.StoredAs == "" || c.entry.Resource.Subresource != "" {
		return nil, nil, errRegistry
	}
	q := &watchfanoutv1.Query{Entry: c.entry, Namespace: c.namespace(), Output: c.out}
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

func (c *call) list() {
	opts, q, err := c.options()
	if err != nil || c.out.Pretty || c.out.MediaType != runtime.ContentTypeJSON && c.out.MediaType != runtime.ContentTypeProtobuf ||
		c.out.GetAs().GetKind() == "PartialObjectMetadata" {
		c.listFromRegistry()
		return
	}
	ctx := c.req.Context()
	stream, err := c.Watch.List(ctx, &watchfanoutv1.ListRequest{Query: q, ResourceVersion: opts.ResourceVersion,
		ResourceVersionMatch: string(opts.ResourceVersionMatch), Limit: opts.Limit, Continue: opts.Continue}, grpc.WaitForReady(false))
	var first *watchfanoutv1.ListChunk
	if err == nil {
		first, err = stream.Recv()
	}
	if err != nil {
		switch status.Code(err) {
		case codes.FailedPrecondition, codes.Unavailable: // not held there, or nobody there
			c.listFromRegistry()
		default:
			c.fail(rpc.FromStatus(err))
		}
		return
	}
	b := newBody(c.w, c.req, c.contentType(), http.StatusOK, first.Size)
	defer b.Close()
	for chunk := first; ; {
		if _, err := b.Write(chunk.Data); err != nil {
			return
		}
		if chunk, err = stream.Recv(); err != nil {
			if !errors.Is(err, io.EOF) {
				panic(http.ErrAbortHandler) // the client must not take half a list for a whole one
			}
			return
		}
	}
}

func (c *call) listFromRegistry() {
	stream, err := c.Registry.List(c.req.Context(), c.read())
	var data []byte
	for err == nil {
		var chunk *registryv1.ListChunk
		if chunk, err = stream.Recv(); err == nil {
			data = append(data, chunk.Data...)
		}
	}
	if !errors.Is(err, io.EOF) {
		c.fail(rpc.FromStatus(err))
		return
	}
	c.respond(&registryv1.ObjectResponse{Code: http.StatusOK, Body: data})
}

// watch keeps a client's stream open, over the loss of any number of replicas.
func (c *call) watch() {
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
	opts, q, err := c.options()
	if err != nil {
		c.refuseWatch()
		return
	}
	timeout := time.Duration(float64(c.MinRequestTimeout) * (rand.Float64() + 1))
	if opts.TimeoutSeconds != nil && *opts.TimeoutSeconds > 0 {
		timeout = time.Duration(*opts.TimeoutSeconds) * time.Second
	}
	ctx, cancel := context.WithTimeout(c.req.Context(), timeout)
	defer cancel()
	stopping := make(chan struct{})
	defer close(stopping)
	go func() {
		select {
		case <-c.Stopping:
			cancel()
		case <-stopping:
		}
	}()
	r := &watchfanoutv1.WatchRequest{Query: q, ResourceVersion: opts.ResourceVersion, ResourceVersionMatch: string(opts.ResourceVersionMatch),
		AllowBookmarks: opts.AllowWatchBookmarks, SendInitialEvents: opts.SendInitialEvents}
	if wsstream.IsWebSocketRequest(c.req) {
		c.overWebSocket(ctx, cancel, r)
		return
	}
	sink := &httpSink{call: c, control: http.NewResponseController(c.w)}
	c.follow(ctx, r, sink)
}

// refuseWatch answers bad options in registry's words.
func (c *call) refuseWatch() {
	r := c.read()
	r.Output = &registryv1.Output{MediaType: runtime.ContentTypeJSON}
	stream, err := c.Registry.List(c.req.Context(), r)
	if err == nil {
		_, err = stream.Recv()
	}
	if err == nil {
		err = apierrors.NewMethodNotSupported(c.groupResource(), "watch")
	}
	c.fail(rpc.FromStatus(err))
}

// sink is where frames go.
type sink interface {
	// open sends the head, once.
	open()
	write(frames []byte) error
	// fail answers an error; only before open.
	fail(error)
}

// heldOpen is how long a stream waits for the watch tier to come back before it is closed and the client asks anew.
const heldOpen = 30 * time.Second

// follow copies frames from the watch tier to out until ctx ends. When a replica is lost the stream goes on with
// another one, after the last event that was sent.
func (c *call) follow(ctx context.Context, r *watchfanoutv1.WatchRequest, out sink) {
	opened := false
	started := false // some initial events were sent
	lost := time.Time{}
	for {
		err := c.copyFrames(ctx, r, func(f *watchfanoutv1.WatchFrame) error {
			lost = time.Time{}
			if !opened {
				out.open()
				opened = true
			}
			if len(f.Data) > 0 {
				started = true
				if err := out.write(f.Data); err != nil {
					return errClientGone
				}
			}
			if f.Position != nil && f.Position.Revision > 0 {
				r.ResumeAfter = f.Position
			}
			r.InitialEventsDone = r.InitialEventsDone || f.InitialEventsDone
			if f.End {
				return io.EOF
			}
			return nil
		}, func() {
			if !opened { // a client learns at once that its watch is accepted
				out.open()
				opened = true
			}
		})
		switch {
		case ctx.Err() != nil, errors.Is(err, io.EOF), errors.Is(err, errClientGone):
			if !opened {
				out.open()
			}
			return
		case status.Code(err) != codes.Unavailable:
			if !opened {
				out.fail(rpc.FromStatus(err))
			}
			return
		}
		if r.ResumeAfter == nil && started { // broken amid the initial events: what was sent cannot be taken back
			return
		}
		if lost.IsZero() {
			lost = time.Now()
		} else if time.Since(lost) > heldOpen {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

var errClientGone = errors.New("the client is gone")

// acceptAfter is how long an answer may wait for its first frame before its head is sent without one.
const acceptAfter = 50 * time.Millisecond

// copyFrames runs one upstream stream.
func (c *call) copyFrames(ctx context.Context, r *watchfanoutv1.WatchRequest, each func(*watchfanoutv1.WatchFrame) error, accepted func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Watch.Watch(ctx, r, grpc.WaitForReady(false))
	if err != nil {
		return err
	}
	type received struct {
		frame *watchfanoutv1.WatchFrame
		err   error
	}
	first := make(chan received, 1)
	go func() {
		f, err := stream.Recv()
		first <- received{f, err}
	}()
	var got received
	t := time.NewTimer(acceptAfter)
	defer t.Stop()
	select {
	case got = <-first:
	case <-t.C:
		accepted()
		got = <-first
	}
	for {
		if got.err != nil {
			return got.err
		}
		if err := each(got.frame); err != nil {
			return err
		}
		got.frame, got.err = stream.Recv()
	}
}

// httpSink writes frames as a chunked body.
type httpSink struct {
	*call
	control *http.ResponseController
}

func (s *httpSink) open() {
	t := s.out.MediaType
	if t != runtime.ContentTypeJSON {
		t += ";stream=watch"
	}
	s.w.Header().Set("Content-Type", t)
	s.w.Header().Set("Transfer-Encoding", "chunked")
	s.w.WriteHeader(http.StatusOK)
	_ = s.control.Flush()
}

func (s *httpSink) write(frames []byte) error {
	if _, err := s.w.Write(frames); err != nil {
		return err
	}
	return s.control.Flush()
}

func (s *httpSink) fail(err error) { s.call.fail(err) }

// overWebSocket sends each event as one message.
func (c *call) overWebSocket(ctx context.Context, cancel context.CancelFunc, r *watchfanoutv1.WatchRequest) {
	c.w.Header().Set("Content-Type", c.out.MediaType)
	handler := websocket.Handler(func(ws *websocket.Conn) {
		defer ws.Close()
		go func() { // a client that closes ends the watch
			defer cancel()
			_, _ = io.Copy(io.Discard, ws)
		}()
		c.follow(ctx, r, &socketSink{ws, c.out.MediaType == runtime.ContentTypeProtobuf})
	})
	server := websocket.Server{Handler: handler, Handshake: func(*websocket.Config, *http.Request) error { return nil }}
	server.ServeHTTP(c.w, c.req)
}

type socketSink struct {
	ws     *websocket.Conn
	binary bool
}

func (s *socketSink) open()      {}
func (s *socketSink) fail(error) {}

func (s *socketSink) write(frames []byte) error {
	for len(frames) > 0 {
		var one []byte
		if s.binary {
			if len(frames) < 4 {
				return fmt.Errorf("a frame is cut short")
			}
			n := 4 + int(frames[0])<<24 + int(frames[1])<<16 + int(frames[2])<<8 + int(frames[3])
			one, frames = frames[4:n], frames[n:]
			if err := websocket.Message.Send(s.ws, one); err != nil {
				return err
			}
			continue
		}
		line, rest, _ := strings.Cut(string(frames), "\n")
		frames = []byte(rest)
		if err := websocket.Message.Send(s.ws, line+"\n"); err != nil {
			return err
		}
	}
	return nil
}

var _ sink = &socketSink{}
