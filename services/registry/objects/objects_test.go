package objects_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/objects"
)

var (
	admin = &commonv1.User{Name: "admin", Groups: []string{"system:masters"}}
	plain = &registryv1.Output{MediaType: "application/json"}
)

// newObjectsClient returns a client of a registry's Objects, as the gateway has it.
func newObjectsClient(t *testing.T) registryv1.ObjectsClient {
	fx := fixture.New(t)
	p := rpc.NewInProcess(false)
	registryv1.RegisterObjectsServer(p, objects.New(fx.Resources))
	return registryv1.NewObjectsClient(p.Client("gateway"))
}

// serveCallbacks starts a call and answers its callbacks with respond until the call ends.
func serveCallbacks(ctx context.Context, call func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[
	registryv1.WriteCall, registryv1.WriteReply], error), r *registryv1.WriteRequest,
	respond func(*registryv1.WriteReply) *registryv1.WriteCall) (*registryv1.WriteReply, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := call(ctx)
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&registryv1.WriteCall{Call: &registryv1.WriteCall_Request{Request: r}}); err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if err != nil || m.GetResult() != nil || m.GetConnection() != nil {
			return m, err
		}
		a := respond(m)
		if a == nil {
			_ = stream.CloseSend()
			continue
		}
		if err := stream.Send(a); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
}

func create(name string) *registryv1.WriteRequest {
	return &registryv1.WriteRequest{
		Verb:        "create",
		Resource:    fixture.ConfigMaps,
		Namespace:   "x",
		User:        admin,
		ContentType: "application/json",
		Body:        []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `"}}`),
		Output:      plain,
		Admit:       fixture.Operations,
	}
}

func admissionResult(a *registryv1.AdmissionResult) *registryv1.WriteCall {
	return &registryv1.WriteCall{Call: &registryv1.WriteCall_Admission{Admission: a}}
}

// A write sends its callbacks in its own stream, and their results decide its outcome.
func TestWriteCallbacks(t *testing.T) {
	o := newObjectsClient(t)
	for name, c := range map[string]struct {
		answer *registryv1.WriteCall
		code   codes.Code
		says   string
	}{
		"admitted": {admissionResult(&registryv1.AdmissionResult{Verdict: &admissionv1.Verdict{}}), codes.OK,
			`"admitted"`},
		"refused": {admissionResult(&registryv1.AdmissionResult{
			Refusal: rpc.StatusProto(&apierrors.NewForbidden(schema.GroupResource{}, "refused",
				errors.New("no room")).ErrStatus),
		}), codes.PermissionDenied, "no room"},
		"misunderstood": {&registryv1.WriteCall{Call: &registryv1.WriteCall_Authorization{
			Authorization: &registryv1.AuthorizationResult{Decision: &authzv1.AuthorizeResponse{}},
		}}, codes.Unknown, "expected an admission result"},
		"left": {nil, codes.Unknown, "the gateway ended the write"},
	} {
		m, err := serveCallbacks(
			t.Context(),
			o.Write,
			create(name),
			func(*registryv1.WriteReply) *registryv1.WriteCall {
				return c.answer
			},
		)
		message := string(m.GetResult().GetBody()) + status.Convert(err).Message()
		if status.Code(err) != c.code || !strings.Contains(message, c.says) {
			t.Errorf("%s: %s, %v", name, m.GetResult().GetBody(), err)
		}
	}
	got, err := o.Get(t.Context(), &registryv1.GetRequest{
		Resource:  fixture.ConfigMaps,
		Namespace: "x",
		Name:      "admitted",
		User:      admin,
		Output:    plain,
	})
	if err != nil || !strings.Contains(string(got.Body), `"admitted"`) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := o.Get(t.Context(), &registryv1.GetRequest{
		Resource:  fixture.ConfigMaps,
		Namespace: "x",
		Name:      "refused",
		User:      admin,
		Output:    plain,
	}); status.Code(err) != codes.NotFound {
		t.Errorf("a refused object is stored: %v", err)
	}
}

// WriteUnary runs a write that needs no callback. A write that needs a callback stores nothing.
func TestWriteUnary(t *testing.T) {
	o := newObjectsClient(t)
	writeUnary := func(r *registryv1.WriteRequest) *registryv1.WriteUnaryReply {
		t.Helper()
		reply, err := o.WriteUnary(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		return reply
	}
	admitted := create("asked")
	if reply := writeUnary(admitted); !reply.CallbackRequired || reply.Result != nil || len(reply.Error) > 0 {
		t.Errorf("a write that needs admission has a result: %v", reply)
	}
	admitted.NamespaceLifecycleOnly = admitted.Admit // this registry has no Namespaces
	if reply := writeUnary(admitted); !reply.CallbackRequired {
		t.Errorf("a write that needs NamespaceLifecycle has a result: %v", reply)
	}
	plain := create("plain")
	plain.Admit = nil
	if reply := writeUnary(
		plain,
	); !strings.Contains(string(reply.GetResult().GetBody()), `"plain"`) ||
		reply.CallbackRequired {
		t.Errorf("%v", reply)
	}
	plain.AuditLevel = commonv1.AuditLevel_AUDIT_LEVEL_REQUEST
	reply := writeUnary(plain)
	st := &rpcstatus.Status{}
	if err := proto.Unmarshal(reply.Error, st); err != nil || reply.Result != nil || reply.CallbackRequired {
		t.Errorf("%v, %v", reply, err)
	}
	if err := rpc.FromStatus(status.ErrorProto(st)); !apierrors.IsAlreadyExists(err) {
		t.Errorf("creating an existing object returns %v", err)
	}
	if !strings.Contains(string(reply.GetAudit().GetRequestObject()), `"plain"`) {
		t.Errorf("a refused write has no audit context: %v", reply.Audit)
	}
	role := create("made")
	role.Admit, role.User = nil, &commonv1.User{Name: "jane"}
	role.Resource = &commonv1.Resource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"}
	role.Body = []byte(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"made"},` +
		`"rules":[{"apiGroups":[""],"resources":["pods"],"verbs":["get"]}]}`)
	if reply := writeUnary(role); !reply.CallbackRequired {
		t.Errorf("a Role is written without authorization: %v", reply)
	}
	role.Verb, role.Name = "deletecollection", ""
	if reply := writeUnary(role); !reply.CallbackRequired {
		t.Errorf("a collection is deleted without callbacks: %v", reply)
	}
	for _, r := range []*registryv1.GetRequest{{Resource: fixture.ConfigMaps, Name: "asked"}, {Resource: role.Resource,
		Name: "made"}} {
		r.Namespace, r.User, r.Output = "x", admin, &registryv1.Output{MediaType: "application/json"}
		if _, err := o.Get(t.Context(), r); status.Code(err) != codes.NotFound {
			t.Errorf("%s is there: %v", r.Name, err)
		}
	}
}

// A list is sent in consecutive chunks.
func TestListChunks(t *testing.T) {
	o := newObjectsClient(t)
	for _, name := range []string{"a", "b"} {
		r := create(name)
		r.Body = []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `"},"data":{"x":"` +
			strings.Repeat("x", 700<<10) + `"}}`)
		r.Admit = nil
		if _, err := serveCallbacks(t.Context(), o.Write, r, nil); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := o.List(t.Context(), &registryv1.GetRequest{
		Resource:  fixture.ConfigMaps,
		Namespace: "x",
		User:      admin,
		Output:    plain,
	})
	var body []byte
	pieces := 0
	if err == nil {
		err = rpc.Each(stream, func(c *registryv1.ListChunk) error {
			body = append(body, c.Data...)
			pieces++
			return nil
		})
	}
	if err != nil || pieces < 2 || !strings.HasSuffix(string(body), "}\n") ||
		strings.Count(string(body), `"uid"`) != 2 {
		t.Errorf("%d pieces, %d bytes, %v", pieces, len(body), err)
	}
}

// A resource that is not served is not found. A stream that does not begin with its request is invalid.
func TestNotServed(t *testing.T) {
	o := newObjectsClient(t)
	nothing := &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "nothings"}
	r := create("x")
	r.Resource = nothing
	if _, err := serveCallbacks(t.Context(), o.Write, r, nil); status.Code(err) != codes.NotFound {
		t.Errorf("written: %v", err)
	}
	if _, err := serveCallbacks(t.Context(), o.Connect, r, nil); status.Code(err) != codes.NotFound {
		t.Errorf("connected to: %v", err)
	}
	r.Resource = fixture.ConfigMaps
	r.Name = "x"
	if _, err := serveCallbacks(t.Context(), o.Connect, r, nil); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a ConfigMap is connected to: %v", err)
	}
	get := &registryv1.GetRequest{Resource: nothing, User: admin, Output: plain}
	if _, err := o.Get(t.Context(), get); status.Code(err) != codes.NotFound {
		t.Errorf("read: %v", err)
	}
	stream, err := o.List(t.Context(), get)
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.NotFound {
		t.Errorf("listed: %v", err)
	}
	for name, call := range map[string]func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[
		registryv1.WriteCall, registryv1.WriteReply], error){"write": o.Write, "connect": o.Connect} {
		stream, err := call(t.Context())
		if err == nil {
			err = stream.Send(admissionResult(&registryv1.AdmissionResult{}))
		}
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s begins without its request: %v", name, err)
		}
	}
}

// A request with a namespace does not reach a cluster-scoped resource, because it was authorized for a namespace.
func TestNamespaceOfClusterScoped(t *testing.T) {
	o := newObjectsClient(t)
	nodes := &commonv1.Resource{Version: "v1", Resource: "nodes"}
	get := &registryv1.GetRequest{Resource: nodes, Namespace: "x", User: admin, Output: plain}
	stream, err := o.List(t.Context(), get)
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.NotFound {
		t.Errorf("listed: %v", err)
	}
	get.Name = "n"
	if _, err := o.Get(t.Context(), get); status.Code(err) != codes.NotFound ||
		!strings.Contains(err.Error(), "could not find the requested resource") {
		t.Errorf("read: %v", err)
	}
	r := create("n")
	r.Resource, r.Verb, r.Name = nodes, "delete", "n"
	if _, err := serveCallbacks(t.Context(), o.Write, r, nil); status.Code(err) != codes.NotFound ||
		!strings.Contains(err.Error(), "could not find the requested resource") {
		t.Errorf("deleted: %v", err)
	}
}
