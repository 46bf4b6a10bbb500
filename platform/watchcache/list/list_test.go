package list_test

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/list"
	"watershed.dev/platform/watchcache/logreader"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

type body struct {
	grpc.ServerStreamingServer[watchfanoutv1.ListChunk]
	ctx  context.Context
	data bytes.Buffer
	size int64
	gzip bool
}

func (b *body) Context() context.Context { return b.ctx }

func (b *body) Send(c *watchfanoutv1.ListChunk) error {
	b.size = max(b.size, c.Size)
	b.gzip = b.gzip || c.Gzip
	for _, p := range c.Data {
		b.data.Write(p)
	}
	return nil
}

// listBody is the names and metadata of a decoded list.
type listBody struct {
	Kind     string
	Metadata struct{ ResourceVersion, Continue string }
	Items    []struct{ Metadata struct{ Name string } }
	Rows     []struct{ Cells []string }
}

func (l listBody) names() string {
	var all []string
	for _, i := range l.Items {
		all = append(all, i.Metadata.Name)
	}
	return strings.Join(all, " ")
}

func getList(t *testing.T, l *list.Server, r *watchfanoutv1.ListRequest) (out listBody, err error) {
	t.Helper()
	b := &body{ctx: t.Context()}
	if err := l.List(r, b); err != nil {
		return out, err
	}
	if int64(b.data.Len()) != b.size {
		t.Errorf("%d bytes are said to be %d", b.data.Len(), b.size)
	}
	if err := json.Unmarshal(b.data.Bytes(), &out); err != nil {
		t.Fatalf("%v: %s", err, b.data.Bytes())
	}
	return out, nil
}

// A list has the selected objects of etcd at the revision that it names.
func TestLists(t *testing.T) {
	w := fixture.New(t)
	l := list.New(w.Discovery, w.Cache, w.LogReader, w.Converter, 0)
	w.Apply(logv1.Type_TYPE_MODIFIED, 11, "b", "node-0", "node-1")
	for name, c := range map[string]struct {
		change func(*watchfanoutv1.ListRequest)
		names  string
		code   codes.Code
	}{
		"consistent":     {func(*watchfanoutv1.ListRequest) {}, "a b c", codes.OK},
		"as it is here":  {func(r *watchfanoutv1.ListRequest) { r.ResourceVersion = "0" }, "a b c", codes.OK},
		"not older than": {func(r *watchfanoutv1.ListRequest) { r.ResourceVersion = "11" }, "a b c", codes.OK},
		"of a label": {func(r *watchfanoutv1.ListRequest) {
			r.Query.LabelSelector = "node=node-0"
		}, "a b c", codes.OK},
		"of another label": {func(r *watchfanoutv1.ListRequest) {
			r.Query.LabelSelector = "node=node-1"
		}, "", codes.OK},
		"of a field": {func(r *watchfanoutv1.ListRequest) {
			r.Query.FieldSelector = "spec.nodeName!=node-0"
		}, "", codes.OK},
		"of one name": {func(r *watchfanoutv1.ListRequest) {
			r.Query.FieldSelector = "metadata.name=c"
		}, "c", codes.OK},
		"of another namespace": {func(r *watchfanoutv1.ListRequest) { r.Query.Namespace = "y" }, "", codes.OK},
		"at an exact revision": {func(r *watchfanoutv1.ListRequest) {
			r.ResourceVersion, r.ResourceVersionMatch = "11", "Exact"
		}, "", codes.FailedPrecondition},
		"with an odd token": {func(r *watchfanoutv1.ListRequest) {
			r.Continue = "rubbish"
		}, "", codes.FailedPrecondition},
		"of an odd selector": {func(r *watchfanoutv1.ListRequest) {
			r.Query.LabelSelector = "==="
		}, "", codes.InvalidArgument},
		"of a resource that is defined later than this replica knows": {func(r *watchfanoutv1.ListRequest) {
			r.Query.CrdRevision, r.Query.Digest = 1, 1
		}, "", codes.FailedPrecondition},
		"of a resource that this replica does not know": {func(r *watchfanoutv1.ListRequest) {
			r.Query.Resource = &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
		}, "", codes.FailedPrecondition},
		"in no form of a tier's": {func(r *watchfanoutv1.ListRequest) {
			r.Query.Output.MediaType = "application/yaml"
		}, "", codes.FailedPrecondition},
	} {
		r := &watchfanoutv1.ListRequest{Query: fixture.Query()}
		c.change(r)
		got, err := getList(t, l, r)
		if status.Code(err) != c.code || got.names() != c.names {
			t.Errorf("%s: %q, %v", name, got.names(), err)
		}
		if err == nil && (got.Kind != "PodList" || got.Metadata.ResourceVersion != "11") {
			t.Errorf("%s: %s at %s", name, got.Kind, got.Metadata.ResourceVersion)
		}
	}
	table, err := getList(t, l, &watchfanoutv1.ListRequest{Query: fixture.Table(fixture.Query())})
	if err != nil || table.Kind != "Table" || len(table.Rows) != 3 {
		t.Errorf("%+v, %v", table, err)
	}
}

// While etcd does not respond, and the log lacks its newest event, a list that does not need that event is served at
// once (kubernetes #123676). Any other list is delegated to registry.
func TestListsWhileEtcdDoesNotRespond(t *testing.T) {
	w := fixture.New(t)
	w.Apply(logv1.Type_TYPE_MODIFIED, 11, "b", "node-0", "node-1")
	reader := logreader.New(w.Cache, nil, logreader.Source{
		Revision: func(context.Context) (int64, error) { return 0, status.Error(codes.Unavailable, "paused") },
		Rows:     logreader.Remote(w.Source, eventlog.Main).Rows,
	}, &lifecycle.Readiness{}, logreader.Config{StaleAfter: 4 * time.Second})
	l := list.New(w.Discovery, w.Cache, reader, w.Converter, 0)
	const unset, exact, notOlder = "", "Exact", "NotOlderThan"
	for _, c := range []struct {
		revision, match string
		limit           int64
		names           string
	}{
		{"", unset, 0, ""},
		{"", unset, 2, ""},
		{"0", unset, 0, "a b c"},
		{"0", unset, 2, "a b c"},
		{"0", notOlder, 0, "a b c"},
		{"11", unset, 0, "a b c"},
		{"11", unset, 2, ""},
		{"11", notOlder, 0, "a b c"},
		{"11", notOlder, 2, "a b"},
		{"11", exact, 0, ""},
		{"11", exact, 2, ""},
	} {
		got, err := getList(t, l, &watchfanoutv1.ListRequest{Query: fixture.Query(), ResourceVersion: c.revision,
			ResourceVersionMatch: c.match, Limit: c.limit})
		delegated := status.Code(err) == codes.FailedPrecondition
		if delegated != (c.names == "") || !delegated && (err != nil || got.names() != c.names) {
			t.Errorf("%+v: %q, %v", c, got.names(), err)
		}
	}
}

// All pages of a list have one revision, whatever is written meanwhile.
func TestPagesAreOfOneRevision(t *testing.T) {
	w := fixture.New(t)
	l := list.New(w.Discovery, w.Cache, w.LogReader, w.Converter, 0)
	first, err := getList(t, l, &watchfanoutv1.ListRequest{Query: fixture.Query(), Limit: 2})
	if err != nil || first.names() != "a b" || first.Metadata.Continue == "" {
		t.Fatalf("%+v, %v", first, err)
	}
	w.Apply(logv1.Type_TYPE_DELETED, 11, "c", "node-0", "")
	w.Apply(logv1.Type_TYPE_ADDED, 12, "d", "node-0", "")
	second, err := getList(t, l, &watchfanoutv1.ListRequest{
		Query:    fixture.Query(),
		Limit:    2,
		Continue: first.Metadata.Continue,
	})
	if err != nil || second.names() != "c" || second.Metadata.ResourceVersion != first.Metadata.ResourceVersion ||
		second.Metadata.Continue != "" {
		t.Errorf("%+v, %v", second, err)
	}
	if now, err := getList(t, l, &watchfanoutv1.ListRequest{
		Query:           fixture.Query(),
		ResourceVersion: "0",
		Limit:           1,
	}); err != nil || now.names() != "a b d" {
		t.Errorf("%+v, %v", now, err) // limit is ignored with resourceVersion "0"
	}
}
