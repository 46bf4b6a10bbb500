package discovery

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Groups are sorted by priority, then by name. Versions are sorted by priority, then in Kubernetes' version order.
func TestGroupsAreInKubeAggregatorsOrder(t *testing.T) {
	var all groups
	for _, x := range []struct {
		gv             string
		group, version int32
	}{
		{"zebra.example.com/v1", 1000, 100}, {"apps/v1", 17800, 15}, {"ant.example.com/v1beta1", 1000, 100},
		{"ant.example.com/v2", 1000, 100}, {"ant.example.com/v10", 1000, 100}, {"ant.example.com/v1", 1000, 200},
	} {
		gv, err := schema.ParseGroupVersion(x.gv)
		if err != nil {
			t.Fatal(err)
		}
		all.add(gv, x.group, x.version)
	}
	var got []string
	for _, g := range all.sorted() {
		got = append(got, g.Name+": "+strings.Join(g.Versions, " "))
	}
	want := "apps: v1, ant.example.com: v1 v10 v2 v1beta1, zebra.example.com: v1"
	if s := strings.Join(got, ", "); s != want {
		t.Error(s)
	}
}

func apiResource(name string) *registryv1.APIResource {
	return &registryv1.APIResource{Resource: &commonv1.Resource{Group: "g", Version: "v1", Resource: name}}
}

// watchStream is a watcher's stream.
type watchStream struct {
	grpc.ServerStreamingServer[registryv1.DiscoveryResponse]
	ctx context.Context
	c   chan *registryv1.DiscoveryResponse
}

func (s *watchStream) Context() context.Context { return s.ctx }

func (s *watchStream) Send(m *registryv1.DiscoveryResponse) error {
	s.c <- m
	return nil
}

// A watcher receives the whole response first, then deltas.
func TestWatchSendsDeltas(t *testing.T) {
	a, b, b2, c := apiResource("a"), apiResource("b"), apiResource("b"), apiResource("c")
	b2.Singular = "changed"
	d := New(nil)
	ctx, cancel := context.WithCancel(t.Context())
	s := &watchStream{ctx: ctx, c: make(chan *registryv1.DiscoveryResponse)}
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(nil, s) }()
	whole := &registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{a, b},
		Openapi:   map[string]string{"v2": "1", "v3/apis/g/v1": "1"},
	}
	d.current.Set(whole)
	if m := <-s.c; m != whole {
		t.Errorf("first %v", m)
	}
	d.current.Set(&registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{b2, c},
		Openapi:   map[string]string{"v2": "2"},
	})
	want := &registryv1.DiscoveryResponse{
		Delta:          true,
		Resources:      []*registryv1.APIResource{b2, c},
		Removed:        []*commonv1.Resource{a.Resource},
		Openapi:        map[string]string{"v2": "2"},
		OpenapiRemoved: []string{"v3/apis/g/v1"},
	}
	if m := <-s.c; !proto.Equal(m, want) {
		t.Errorf("then %v", m)
	}
	cancel()
	<-ended
}

// A response that is larger than a message is split, and the watcher can merge the parts.
func TestLargeResponsesAreSplit(t *testing.T) {
	whole := &registryv1.DiscoveryResponse{
		Groups:  []*registryv1.Group{{Name: "g"}},
		Openapi: map[string]string{"v2": "x"},
	}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		e := apiResource(name)
		e.Categories = []string{strings.Repeat(name, partBytes*2/5)}
		whole.Resources = append(whole.Resources, e)
	}
	whole.Resources = append(whole.Resources, apiResource("f"))
	all := splitResponse(whole)
	if len(all) != 3 || all[0].Delta || !all[0].More || !all[1].Delta || !all[1].More || !all[2].Delta || all[2].More {
		t.Fatalf("%d parts", len(all))
	}
	var got []string
	for _, p := range all {
		if n := proto.Size(p); n > partBytes+1000 {
			t.Errorf("a part of %d bytes", n)
		}
		for _, e := range p.Resources {
			got = append(got, e.Resource.Resource)
		}
	}
	if strings.Join(got, "") != "abcdef" || len(all[0].Openapi) != 1 || len(all[1].Openapi) != 0 {
		t.Errorf("%q", got)
	}
	if single := splitResponse(&registryv1.DiscoveryResponse{}); len(single) != 1 || single[0].Delta || single[0].More {
		t.Errorf("parts of an empty response: %v", single)
	}
}

// documents is the stream of an OpenAPI call.
type documents struct {
	grpc.ServerStreamingServer[registryv1.OpenAPIChunk]
	ctx context.Context
}

func (d documents) Context() context.Context { return d.ctx }

// Documents are made sequentially. A call that waits for its turn ends with its client, and no document is made for it.
func TestADocumentOfALeftClientIsNotMade(t *testing.T) {
	cat := New(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cat.making <- struct{}{}
	ended := make(chan error, 1)
	v2 := &registryv1.OpenAPIRequest{Path: "v2"}
	go func() { ended <- cat.OpenAPI(v2, documents{ctx: ctx}) }()
	select {
	case err := <-ended:
		t.Fatalf("it does not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	cancel()
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	<-cat.making
	if err := cat.OpenAPI(v2, documents{ctx: ctx}); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}
