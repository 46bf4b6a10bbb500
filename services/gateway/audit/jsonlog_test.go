package audit

import (
	"bytes"
	"io"
	"reflect"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	pluginlog "k8s.io/apiserver/plugin/pkg/audit/log"
	"sigs.k8s.io/randfill"
)

// A line is identical to upstream's line, for every content of the event.
func TestLinesAreUpstreams(t *testing.T) {
	var want, got bytes.Buffer
	upstream := pluginlog.NewBackend(&want, pluginlog.FormatJson, auditv1.SchemeGroupVersion)
	ours := &jsonLogBackend{pluginlog.NewBackend(&got, pluginlog.FormatJson, auditv1.SchemeGroupVersion), &got}
	compare := func(e *auditinternal.Event) {
		t.Helper()
		want.Reset()
		got.Reset()
		if upstream.ProcessEvents(e) != ours.ProcessEvents(e) || !bytes.Equal(want.Bytes(), got.Bytes()) {
			t.Fatalf("%s\nwant\n%s", got.Bytes(), want.Bytes())
		}
	}
	compare(&auditinternal.Event{})
	odd := []string{"", "a", `"\`, "<&>", "\x00\n\x7f", "é\u2028", "\xff", "plain text"}
	fill := randfill.New().NilChance(0.3).NumElements(0, 4).Funcs(
		func(u *runtime.Unknown, c randfill.Continue) {
			u.Raw, u.ContentType = []byte(`{"a": "<b>"}`), "application/json"
		},
		func(s *string, c randfill.Continue) { *s = odd[c.Intn(len(odd))] + c.String(3) },
		func(m *metav1.MicroTime, c randfill.Continue) {
			if c.Bool() {
				m.Time = time.Unix(c.Int63n(1<<33), c.Int63n(1e9)).In(time.FixedZone("x", c.Intn(40000)))
			}
		},
		func(s *metav1.Status, c randfill.Continue) {
			if s.Code = int32(c.Intn(600)); c.Bool() {
				c.FillNoCustom(s)
			}
		},
	)
	for i := range 20000 {
		e := &auditinternal.Event{}
		fill.Fill(e)
		if i%4 > 0 {
			e.RequestObject, e.ResponseObject = nil, nil
		}
		compare(e)
	}
}

// The test fails if upstream adds a field, because appendEvent must then write it.
func TestEveryFieldOfAnEventIsKnown(t *testing.T) {
	for _, c := range []struct {
		of   any
		want int
	}{{auditinternal.Event{}, 18}, {auditinternal.ObjectReference{}, 8}, {auditinternal.AuthenticationMetadata{}, 1}} {
		if got := reflect.TypeOf(c.of).NumField(); got != c.want {
			t.Errorf("%T has %d fields, and %d are written", c.of, got, c.want)
		}
	}
}

func BenchmarkLine(b *testing.B) {
	upstream := pluginlog.NewBackend(io.Discard, pluginlog.FormatJson, auditv1.SchemeGroupVersion)
	e := &auditinternal.Event{
		Level: "Metadata", AuditID: "0b8ff0a3-2c39-4ad6-9a45-3a1d1c1e7d11", Stage: "ResponseComplete",
		RequestURI: "/api/v1/namespaces/default/pods/a", Verb: "get", SourceIPs: []string{"10.0.0.1"},
		UserAgent: "kubectl/v1.36.3 (linux/amd64) kubernetes/0123456",
		ObjectRef: &auditinternal.ObjectReference{Resource: "pods", Namespace: "default", Name: "a",
			APIVersion: "v1"},
		ResponseStatus:           &metav1.Status{Code: 200},
		RequestReceivedTimestamp: metav1.NowMicro(), StageTimestamp: metav1.NowMicro(),
		Annotations: map[string]string{"authorization.k8s.io/decision": "allow", "authorization.k8s.io/reason": ""},
	}
	e.User.Username, e.User.Groups = "system:serviceaccount:default:robot", []string{"system:authenticated"}
	b.Run("upstream", func(b *testing.B) {
		for b.Loop() {
			upstream.ProcessEvents(e)
		}
	})
	b.Run("ours", func(b *testing.B) {
		ours := &jsonLogBackend{upstream, io.Discard}
		for b.Loop() {
			ours.ProcessEvents(e)
		}
	})
}
