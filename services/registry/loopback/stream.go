package loopback

import (
	"context"
	"io"
	"net/http"
	"strconv"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// watch streams the selected events after the requested resourceVersion.
func (l *Loopback) watch(ctx context.Context, done func(), req *http.Request, apiResource *registryv1.APIResource,
	namespace string) *http.Response {
	options := req.URL.Query()
	if options.Get("sendInitialEvents") != "" { // a reflector falls back to list and watch
		done()
		return errorResponse(req, apierrors.NewInvalid(schema.GroupKind{
			Group: metav1.GroupName,
			Kind:  "ListOptions",
		}, "", nil))
	}
	after := options.Get("resourceVersion")
	if _, err := strconv.ParseInt(after, 10, 64); err != nil || apiResource.StorageResource == "" {
		done()
		return errorResponse(req,
			apierrors.NewBadRequest("a loopback watch needs a resourceVersion and a stored resource"))
	}
	if !apiResource.Namespaced {
		namespace = ""
	}
	r, w := io.Pipe()
	go func() {
		defer done()
		w.CloseWithError(l.run(&watchfanoutv1.WatchRequest{
			Query: &watchfanoutv1.Query{
				Resource:      apiResource.Resource,
				Namespace:     namespace,
				LabelSelector: options.Get("labelSelector"),
				FieldSelector: options.Get("fieldSelector"),
				Output:        &registryv1.Output{MediaType: runtime.ContentTypeJSON},
			},
			ResourceVersion: after,
		}, &stream{ctx: ctx, body: w}))
	}()
	return &http.Response{
		StatusCode:    http.StatusOK,
		Status:        "200 OK",
		Proto:         "HTTP/2.0",
		ProtoMajor:    2,
		Request:       req,
		Header:        http.Header{"Content-Type": {runtime.ContentTypeJSON}},
		Body:          &pipeBody{r, done},
		ContentLength: -1,
	}
}

// run runs a watch. A panic becomes its error, as in a call of gRPC.
func (l *Loopback) run(r *watchfanoutv1.WatchRequest, s *stream) (err error) {
	defer recovery.ToError("a loopback watch", &err)
	return l.watches.Watch(r, s)
}

type pipeBody struct {
	*io.PipeReader
	done func()
}

func (p *pipeBody) Close() error {
	p.done()
	return p.PipeReader.Close()
}

// stream is the stream of a watch. It writes the frames to a response body.
type stream struct {
	grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	ctx  context.Context
	body io.Writer
}

// Context implements grpc.ServerStream.
func (s *stream) Context() context.Context { return s.ctx }

// Send implements grpc.ServerStreamingServer.
func (s *stream) Send(m *watchfanoutv1.WatchFrame) error {
	for _, data := range append(m.Initial, m.Data) {
		if len(data) == 0 {
			continue
		}
		if _, err := s.body.Write(data); err != nil {
			return err
		}
	}
	return nil
}

// SendMsg implements grpc.ServerStream.
func (s *stream) SendMsg(m any) error {
	tracked := m.(*rpc.TrackedFrame)
	defer tracked.Done()
	return s.Send(tracked.WatchFrame)
}
