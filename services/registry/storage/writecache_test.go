package storage_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// countingClient counts the values that are read from etcd.
type countingClient struct {
	etcdkubernetes.Interface
	n int
}

func (r *countingClient) Get(
	ctx context.Context,
	key string,
	o etcdkubernetes.GetOptions,
) (etcdkubernetes.GetResponse, error) {
	r.n++
	return r.Interface.Get(ctx, key, o)
}

// An update starts from the value that this registry wrote last, and ends with the value in etcd.
func TestUpdateUsesWriteCache(t *testing.T) {
	fx := fixture.New(t)
	etcd := fx.Resources.Storage.Client
	client := countReads(fx)
	write := func(verb, body string) (string, error) {
		t.Helper()
		resp, err := fx.Write(t.Context(), fixture.ConfigMaps, &registryv1.WriteRequest{
			Verb:        verb,
			Name:        map[bool]string{true: "a"}[verb != "create"],
			ContentType: map[string]string{"patch": "application/merge-patch+json"}[verb],
			Body:        []byte(body),
		}, &fixture.Callbacks{})
		return string(resp.GetBody()), err
	}
	behind := func(value string) { // writes as another registry does
		t.Helper()
		const key = "/registry/configmaps/x/a"
		var err error
		if value == "" {
			_, err = etcd.Delete(t.Context(), key)
		} else {
			_, err = etcd.Put(t.Context(), key, value)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	object := func(data string) string {
		return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"x","uid":"u"},`+
			`"data":{%s}}`, data)
	}
	for _, step := range []struct {
		what       string
		before     func()
		verb, body string
		reads      int
		want       string // part of the object, or of the error's reason
	}{
		{"made", nil, "create", object(`"k":"1"`), 0, `"k":"1"`},
		{"patched", func() { fx.Resources.Storage.SweepCaches(time.Hour) }, "patch", `{"data":{"l":"1"}}`, 0,
			`"k":"1","l":"1"`},
		{"patched after a sweep", func() { fx.Resources.Storage.SweepCaches(0) }, "patch", `{"data":{"l":"2"}}`, 1,
			`"k":"1","l":"2"`},
		{"the same again", nil, "patch", `{"data":{"l":"2"}}`, 1, `"k":"1","l":"2"`}, // no write to etcd
		{"as of an old revision", nil, "update",
			strings.Replace(object(`"k":"9"`), `"uid":"u"`, `"resourceVersion":"1"`, 1), 1, "Conflict"},
		{"changed by another", func() { behind(object(`"k":"3"`)) }, "patch", `{"data":{"m":"4"}}`, 0,
			`"k":"3","m":"4"`},
		{"deleted by another", func() { behind("") }, "patch", `{"data":{"m":"5"}}`, 0, "NotFound"},
		{"recreated", func() { behind(object(`"k":"6"`)) }, "patch", `{"data":{"m":"7"}}`, 0, `"k":"6","m":"7"`},
		{"an event of another's change", func() {
			behind(object(`"k":"8"`))
			fx.Resources.Storage.Invalidate(&logv1.Event{StorageResource: "configmaps", Namespace: "x", Name: "a",
				Revision: 1 << 40})
		}, "patch", `{"data":{"m":"9"}}`, 1, `"k":"8","m":"9"`},
		{"another epoch", fx.Resources.Storage.ClearCaches, "patch", `{"data":{"m":"10"}}`, 1, `"k":"8","m":"10"`},
		{"undecodable: not cached", func() { behind("rubbish") }, "patch", `{"data":{"m":"11"}}`, 0, "illegal base64"},
		// upstream's store reads an object before it deletes it
		{"removed", func() { behind(object("")) }, "delete", "", 1, `"name":"a"`},
		{"removed again", nil, "delete", "", 1, "NotFound"},
	} {
		if step.before != nil {
			step.before()
		}
		client.n = 0
		got, err := write(step.verb, step.body)
		if err != nil {
			got = string(apierrors.ReasonForError(err)) + err.Error()
		}
		if !strings.Contains(got, step.want) || client.n != step.reads {
			t.Errorf("%s: %d reads of etcd, %s, %v", step.what, client.n, got, err)
		}
	}
}
