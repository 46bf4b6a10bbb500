package loopback

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/watchcache"
)

// watch streams the selected events after the requested resourceVersion.
func (l *Loopback) watch(ctx context.Context, done func(), req *http.Request, apiResource *registryv1.APIResource,
	info *request.RequestInfo) *http.Response {
	q := req.URL.Query()
	if q.Get("sendInitialEvents") != "" { // a reflector falls back to list and watch
		done()
		return errorResponse(req, apierrors.NewInvalid(schema.GroupKind{
			Group: metav1.GroupName,
			Kind:  "ListOptions",
		}, "", nil))
	}
	after, err := strconv.ParseInt(q.Get("resourceVersion"), 10, 64)
	if err != nil || apiResource.StorageResource == "" {
		done()
		return errorResponse(req, apierrors.NewBadRequest("a loopback watch needs a resourceVersion and a stored resource"))
	}
	namespace := ""
	if apiResource.Namespaced {
		namespace = info.Namespace
	}
	selector, err := watchcache.NewSelector(namespace, q.Get("labelSelector"), q.Get("fieldSelector"))
	if err != nil {
		done()
		return errorResponse(req, err)
	}
	r, w := io.Pipe()
	go func() {
		defer done()
		watcher := l.cache.Watch(apiResource.StorageResource, events.Position{Revision: after, Index: events.LastIndex})
		err := watcher.Each(ctx, func(e *logv1.Event) error { return writeEvent(w, apiResource, e, selector) })
		if errors.Is(err, watchcache.ErrExpired) {
			err = writeExpired(w, after)
		}
		w.CloseWithError(err)
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

type pipeBody struct {
	*io.PipeReader
	done func()
}

func (p *pipeBody) Close() error {
	p.done()
	return p.PipeReader.Close()
}

// writeExpired ends a watch with 410: the client lists and watches again.
func writeExpired(w io.Writer, after int64) error {
	err := apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d", after))
	data, _ := json.Marshal(responsewriters.ErrorToAPIStatus(err)) // with kind and apiVersion, which clients require
	_, _ = fmt.Fprintf(w, `{"type":"ERROR","object":%s}`+"\n", data)
	return io.EOF
}

func writeEvent(w io.Writer, apiResource *registryv1.APIResource, e *logv1.Event, selector watchcache.Selector) error {
	event, o := watchcache.Classify(e, selector)
	if event == "" {
		return nil
	}
	_, err := w.Write(frame.WatchJSON(event,
		frame.Object(nil, apiResource.StoredKind.Kind, frame.APIVersion(apiResource.StoredKind), o.Json)))
	return err
}
