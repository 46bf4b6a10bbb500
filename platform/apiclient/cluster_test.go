package apiclient

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// server is an API whose watches send no events, as behind a stalled log, while its lists are current.
type server struct {
	mu       sync.Mutex
	revision int
	roles    map[string]int // name to revision
	down     bool
	unserved string // lists of this path are answered with 404
	// rejected has the paths of the requests that the server rejected while it was down.
	rejected []string
	// frozen: every second request gets no response. requests counts them.
	frozen   bool
	requests int
	versions []string // the resourceVersions of lists
}

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	f()
}

func (s *server) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	s.mu.Lock()
	if s.down {
		s.rejected = append(s.rejected, req.URL.Path)
		s.mu.Unlock()
		w.Header().Set("Retry-After", "1") // as gateways send
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	if req.URL.Query().Get("watch") != "" {
		s.mu.Unlock()
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		w.(http.Flusher).Flush()
		<-req.Context().Done()
		return
	}
	if req.URL.Path == s.unserved {
		s.mu.Unlock()
		http.NotFound(w, req)
		return
	}
	if s.requests++; s.frozen && s.requests%2 == 1 {
		s.mu.Unlock()
		<-req.Context().Done()
		return
	}
	defer s.mu.Unlock()
	s.versions = append(s.versions, req.URL.Query().Get("resourceVersion"))
	if strings.HasSuffix(req.URL.Path, "/namespaces") {
		listMeta := metav1.ListMeta{ResourceVersion: fmt.Sprint(s.revision)}
		_ = json.NewEncoder(w).Encode(metav1.PartialObjectMetadataList{ListMeta: listMeta})
		return
	}
	list := &rbacv1.RoleList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(s.revision)}}
	for name, revision := range s.roles {
		list.Items = append(list.Items, rbacv1.Role{ObjectMeta: metav1.ObjectMeta{
			Namespace:       "x",
			Name:            name,
			ResourceVersion: fmt.Sprint(revision),
		}})
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	data, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, rbacv1.SchemeGroupVersion), list)
	if err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_, _ = w.Write(data)
}

// newCluster returns a Cluster that reads from s, and a function that runs it until the test ends.
func newCluster(t *testing.T, s *server) (c *Cluster, run func(starts ...func(stop <-chan struct{}))) {
	t.Helper()
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	c, err := NewCluster(&Conn{Config: &rest.Config{Host: srv.URL, QPS: -1}}, Freshness{Bound: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return c, func(starts ...func(<-chan struct{})) {
		done := make(chan struct{})
		go func() { defer close(done); _ = c.Run(t.Context(), starts...) }()
		t.Cleanup(func() { srv.CloseClientConnections(); <-done })
	}
}

// Informers start once the gateway has returned etcd's revision. A list that fails would delay them, and the service's
// readiness with them.
func TestInformersStartOnceTheGatewayReturnsTheRevision(t *testing.T) {
	s := &server{revision: 10, down: true}
	c, run := newCluster(t, s)
	c.Informers.Rbac().V1().Roles().Informer()
	started := make(chan struct{})
	run(func(<-chan struct{}) { close(started) })
	ready := map[string]<-chan struct{}{"other informers": started, "synced": c.Synced(), "fresh": c.Fresh()}
	deadline := time.Now().Add(2 * time.Minute)
	for rejected := 0; rejected < 3; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the revision is not requested again")
		}
		s.mu.Lock()
		rejected = len(s.rejected)
		for name, c := range ready {
			select {
			case <-c:
				t.Errorf("%s: before the gateway has returned the revision", name)
			default:
			}
		}
		s.down = rejected < 3
		s.mu.Unlock()
	}
	for name, c := range ready {
		select {
		case <-c:
		case <-time.After(time.Until(deadline)):
			t.Errorf("%s: not in time", name)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range s.rejected {
		if path != "/api/v1/namespaces" {
			t.Errorf("%s was requested before the gateway had returned the revision", path)
		}
	}
}

// An informer of a resource that --runtime-config disables never reads objects. Other informers and the age of the
// policy do not wait for it.
func TestOtherInformersDoNotWaitForAnUnservedResource(t *testing.T) {
	s := &server{revision: 10, unserved: "/apis/rbac.authorization.k8s.io/v1/clusterroles"}
	c, run := newCluster(t, s)
	c.Informers.Rbac().V1().Roles().Informer()
	unserved := c.Informers.Rbac().V1().ClusterRoles().Informer()
	c.TrackAge(s.unserved, "", unserved)
	run()
	for name, ready := range map[string]<-chan struct{}{"synced": c.Synced(), "fresh": c.Fresh()} {
		select {
		case <-ready:
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s: not in time", name)
		}
	}
	if err := c.Err(); err != nil {
		t.Errorf("the policy is not fresh: %v", err)
	}
	if unserved.HasSynced() {
		t.Error("the informer of the unserved resource has read it")
	}
}

// If watches send no events, lists update the informers: new, changed and deleted objects. They do so too while every
// second request gets no response. If lists fail too, Err returns an error.
func TestClusterStaysFreshWhileWatchesStall(t *testing.T) {
	s := &server{revision: 10, roles: map[string]int{"kept": 5, "changed": 6, "gone": 7}}
	c, run := newCluster(t, s)
	roles := c.Informers.Rbac().V1().Roles()
	c.TrackAge("/apis/rbac.authorization.k8s.io/v1/roles", "", roles.Informer())
	if c.Err() == nil {
		t.Error("a policy that was never read is fresh")
	}
	run()
	wait := func(name string, f func() bool) {
		t.Helper()
		for until := time.Now().Add(2 * time.Minute); !f(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%s: not in time", name)
			}
		}
	}
	wait("read", func() bool { return c.Err() == nil })
	s.set(func() {
		s.frozen, s.requests = true, 0
		delete(s.roles, "gone")
		s.roles["changed"], s.roles["new"] = s.revision, s.revision
	})
	wait("brought up to date", func() bool {
		if err := c.Err(); err != nil {
			t.Fatal(err)
		}
		l := roles.Lister().Roles("x")
		_, kept := l.Get("kept")
		_, fresh := l.Get("new")
		_, gone := l.Get("gone")
		changed, err := l.Get("changed")
		return kept == nil && fresh == nil && gone != nil && err == nil && changed.ResourceVersion != "6"
	})
	if err := c.Err(); err != nil {
		t.Errorf("though it was read in time: %v", err)
	}
	s.mu.Lock()
	for _, v := range s.versions {
		if v != "" {
			t.Errorf("a list accepts %q", v)
		}
	}
	s.down = true
	s.mu.Unlock()
	wait("not fresh", func() bool { return c.Err() != nil })
	reached := trackedInformer{"/apis/rbac.authorization.k8s.io/v1/roles", "", roles.Informer()}
	if err := c.catchUp(t.Context(), reached, 1); err != nil {
		t.Errorf("an informer that is not behind is listed: %v", err)
	}
	s.mu.Lock()
	s.down = false
	s.mu.Unlock()
	wait("fresh again", func() bool { return c.Err() == nil })
}

// Frames are injected after a whole frame, for any cut of frames into reads.
func TestFramesAreInjectedBetweenFrames(t *testing.T) {
	st := &stream{}
	frame := []byte{0, 0, 0, 3, 'a', 'b', 'c'}
	two := append(append([]byte{}, frame...), frame...)
	for i := range two {
		st.trackFrames(two[i : i+1])
		if between := st.left == 0 && len(st.head) == 0; between != ((i+1)%len(frame) == 0) {
			t.Errorf("after %d bytes: between frames %v", i+1, between)
		}
	}
	data, err := encodeEvents([]watch.Event{{
		Type:   watch.Deleted,
		Object: &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "x"}},
	}}, &rbacv1.RoleList{}, "42")
	if err != nil {
		t.Fatal(err)
	}
	st.trackFrames(data)
	if st.left != 0 || len(st.head) != 0 || !strings.Contains(string(data), "BOOKMARK") ||
		!strings.Contains(string(data), "DELETED") {
		t.Errorf("%q", data)
	}
}

// A watch that has received a frame since the list began is not stalled: the list may be older than its events.
func TestAListIsNotInjectedAfterANewerEvent(t *testing.T) {
	frame := "\x00\x00\x00\x03abc"
	all := &streams{open: map[*stream]struct{}{}}
	st := &stream{owner: all, path: "/p", body: io.NopCloser(strings.NewReader(frame))}
	all.open[st] = struct{}{}
	at, err := all.positions("/p", "")
	if err != nil || len(at) != 1 {
		t.Fatal(at, err)
	}
	if _, err := io.ReadFull(st, make([]byte, len(frame))); err != nil {
		t.Fatal(err)
	}
	all.inject(at, []byte("older"))
	if got, err := io.ReadAll(st); len(got) > 0 || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if others, err := all.positions("/others", ""); err != nil || len(others) > 0 {
		t.Errorf("%v, %v", others, err)
	}
}

// An injected list is not replaced while it is read: the watch ends with it.
func TestASecondInjectionReplacesNothing(t *testing.T) {
	all := &streams{open: map[*stream]struct{}{}}
	st := &stream{owner: all, path: "/p", body: io.NopCloser(strings.NewReader(""))}
	all.open[st] = struct{}{}
	for _, frames := range []string{"first", "second"} {
		at, err := all.positions("/p", "")
		if err != nil {
			t.Fatal(err)
		}
		all.inject(at, []byte(frames))
	}
	if got, err := io.ReadAll(st); string(got) != "first" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}
