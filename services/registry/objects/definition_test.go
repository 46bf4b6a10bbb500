package objects_test

import (
	"bytes"
	"testing"

	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/objects"
)

var widgets = &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}

const widgetDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
	"metadata":{"name":"widgets.example.com"},"spec":{"group":"example.com","scope":"Namespaced",
	"names":{"plural":"widgets","kind":"Widget"},"versions":[{"name":"v1","served":true,"storage":true,
	"schema":{"openAPIV3Schema":{"type":"object","properties":{"old":{"type":"string"}}}}}]}}`

// A registry that has not received the last change of a CRD stores objects under the new definition all the same.
func TestAWriteUsesTheDefinitionInEtcd(t *testing.T) {
	fx := fixture.New(t)
	fx.Establish(t, widgetDefinition)
	p := rpc.NewInProcess(false)
	registryv1.RegisterObjectsServer(p, objects.New(fx.Resources))
	client := registryv1.NewObjectsClient(p.Client("gateway"))
	request := func(verb, query, body string) *registryv1.WriteRequest {
		return &registryv1.WriteRequest{
			Verb: verb, Resource: widgets, Namespace: "x", Name: map[string]string{"patch": "a"}[verb], User: admin,
			ContentType: map[string]string{"create": "application/json", "patch": "application/merge-patch+json"}[verb],
			Output:      plain, Body: []byte(body), Query: query,
		}
	}
	_, known, err := fx.Resources.WriteScope(t.Context(), widgets)
	if err != nil || known == nil {
		t.Fatal("no definition: ", err)
	}
	etcd := fx.Resources.Storage.Client.Client
	for _, step := range []struct{ verb, name, query, field string }{
		{"create", "a", "", "first"}, {"patch", "a", "", "second"}, {"create", "c", "fieldValidation=Strict", "third"},
	} {
		stored, err := etcd.Get(t.Context(), known.Key)
		if err != nil || len(stored.Kvs) != 1 {
			t.Fatal(stored, err)
		}
		changed := bytes.Replace(stored.Kvs[0].Value, []byte(`"properties":{`),
			[]byte(`"properties":{"`+step.field+`":{"type":"string"},`), 1)
		changed = bytes.Replace(changed, []byte(`"generation":`), []byte(`"generation":1`), 1) // 11, 111, 1111
		if _, err := etcd.Put(t.Context(), known.Key, string(changed)); err != nil {
			t.Fatal(err)
		}
		reply, err := client.WriteUnary(t.Context(), request(step.verb, step.query, `{"apiVersion":"example.com/v1",
			"kind":"Widget","metadata":{"name":"`+step.name+`"},"`+step.field+`":"kept"}`))
		if err != nil || !bytes.Contains(reply.GetResult().GetBody(), []byte(`"`+step.field+`":"kept"`)) {
			t.Errorf("%s: %v, %v", step.verb, reply, err)
		}
	}
	if _, err := etcd.Delete(t.Context(), known.Key); err != nil {
		t.Fatal(err)
	}
	reply, err := client.WriteUnary(t.Context(), request("create", "",
		`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"b"}}`))
	if refusal := new(rpcstatus.Status); err != nil || proto.Unmarshal(reply.Error, refusal) != nil ||
		!apierrors.IsNotFound(rpc.FromStatus(status.FromProto(refusal).Err())) {
		t.Errorf("a create under a deleted definition: %v, %v", reply, err)
	}
}
