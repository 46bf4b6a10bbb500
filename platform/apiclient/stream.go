package apiclient

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

// streams are the open watches of a client, and the resources that it could not list.
type streams struct {
	mu   sync.Mutex
	open map[*stream]struct{}
	// unserved reports for the path of a resource whether its last list was answered with 404.
	unserved map[string]bool
}

// stream is the body of a watch. Injected frames follow the frame that is being read, and end the watch.
type stream struct {
	owner *streams
	path  string
	query url.Values
	body  io.ReadCloser

	mu sync.Mutex
	// left is the number of unread bytes of a frame. head has the bytes that were read of the length of the next
	// frame. frames counts the frames that have begun.
	left     int
	head     []byte
	frames   int
	injected *bytes.Reader
}

// wrap records the watches of a client, and lists of resources that are not served.
func (s *streams) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		q := req.URL.Query()
		watches := req.Method == http.MethodGet && (q.Get("watch") == "true" || q.Get("watch") == "1")
		if req.Method == http.MethodGet && !watches && q.Get("resourceVersion") != "" {
			// An informer that lists again would accept any revision. Without resourceVersion the list is consistent.
			q.Del("resourceVersion")
			q.Del("resourceVersionMatch")
			req = req.Clone(req.Context())
			req.URL.RawQuery = q.Encode()
		}
		resp, err := next.RoundTrip(req)
		if err == nil && !watches && isCollection(req.URL.Path) {
			s.setUnserved(req.URL.Path, resp.StatusCode == http.StatusNotFound)
		}
		if err != nil || !watches || resp.StatusCode != http.StatusOK {
			return resp, err
		}
		st := &stream{
			owner: s,
			path:  req.URL.Path,
			query: q,
			body:  resp.Body,
		}
		s.mu.Lock()
		s.open[st] = struct{}{}
		s.mu.Unlock()
		resp.Body = st
		return resp, nil
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// Read implements io.Reader. A frame is a length of four bytes and that many bytes.
func (s *stream) Read(p []byte) (int, error) {
	if n, err, done := s.readInjected(p); done {
		return n, err
	}
	n, err := s.body.Read(p)
	s.mu.Lock()
	s.trackFrames(p[:n])
	injected := s.injected != nil
	between := s.left == 0 && len(s.head) == 0
	s.mu.Unlock()
	if err != nil && injected && between { // inject closed the body
		err = nil
	}
	return n, err
}

func (s *stream) readInjected(p []byte) (n int, err error, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.injected == nil || s.left > 0 || len(s.head) > 0 {
		return 0, nil, false
	}
	n, err = s.injected.Read(p)
	return n, err, true
}

// trackFrames tracks the boundaries of frames. The caller holds the lock.
func (s *stream) trackFrames(p []byte) {
	for len(p) > 0 {
		if s.left > 0 {
			n := min(s.left, len(p))
			s.left -= n
			p = p[n:]
			continue
		}
		n := min(4-len(s.head), len(p))
		s.head = append(s.head, p[:n]...)
		p = p[n:]
		if len(s.head) == 4 {
			s.frames++
			s.left = int(binary.BigEndian.Uint32(s.head))
			s.head = s.head[:0]
		}
	}
}

// Close implements io.Closer.
func (s *stream) Close() error {
	s.owner.mu.Lock()
	delete(s.owner.open, s)
	s.owner.mu.Unlock()
	return s.body.Close()
}

// positions are the frames that each watch has received.
type positions map[*stream]int

// positions returns the positions of the open watches of a path.
func (s *streams) positions(path, query string) (positions, error) {
	want, err := url.ParseQuery(query)
	if err != nil {
		return nil, err
	}
	at := positions{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for st := range s.open {
		if st.path == path && reflect.DeepEqual(st.query["fieldSelector"], want["fieldSelector"]) {
			st.mu.Lock()
			at[st] = st.frames
			st.mu.Unlock()
		}
	}
	return at, nil
}

// inject ends a watch with frames, if it is still at its position. A watch that has received a frame since is
// not stalled, and its events may be newer than the frames. Without an open watch, the informer lists by itself.
func (s *streams) inject(at positions, frames []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for st, position := range at {
		if _, open := s.open[st]; !open {
			continue
		}
		st.mu.Lock()
		moved, ends := st.frames != position || st.left > 0 || len(st.head) > 0, st.injected != nil
		if !moved && !ends {
			st.injected = bytes.NewReader(frames)
		}
		st.mu.Unlock()
		if ends { // another service has injected a list
			return
		}
		if moved {
			continue
		}
		_ = st.body.Close() // ends a blocked Read
		return
	}
}

// encodeEvents encodes events as the watch of a typed client receives them, and then a bookmark at a revision. list
// has the type of a list of the objects.
func encodeEvents(events []watch.Event, list runtime.Object, revision string) ([]byte, error) {
	kinds, _, err := scheme.Scheme.ObjectKinds(list)
	if err != nil {
		return nil, err
	}
	gvk := kinds[0]
	gvk.Kind = gvk.Kind[:len(gvk.Kind)-len("List")]
	bookmark, err := scheme.Scheme.New(gvk)
	if err != nil {
		return nil, err
	}
	m, err := meta.Accessor(bookmark)
	if err != nil {
		return nil, err
	}
	m.SetResourceVersion(revision)
	var out bytes.Buffer
	for _, e := range append(events, watch.Event{Type: watch.Bookmark, Object: bookmark}) {
		if err := encodeEvent(&out, e, gvk); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

func encodeEvent(out *bytes.Buffer, e watch.Event, gvk schema.GroupVersionKind) error {
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		return fmt.Errorf("no serializer for %s", runtime.ContentTypeProtobuf)
	}
	raw, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, gvk.GroupVersion()), e.Object)
	if err != nil {
		return err
	}
	data, err := (&metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: raw}}).Marshal()
	if err != nil {
		return err
	}
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(data)))
	out.Write(length[:])
	out.Write(data)
	return nil
}
