package audit

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	pluginbuffered "k8s.io/apiserver/plugin/pkg/audit/buffered"

	"watershed.dev/platform/reload"
	"watershed.dev/platform/reload/reloadtest"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// sink collects events. If release is not nil, each batch waits for it.
type sink struct {
	mu      sync.Mutex
	events  []*auditinternal.Event
	release chan struct{}
}

func (s *sink) ProcessEvents(events ...*auditinternal.Event) bool {
	if s.release != nil {
		<-s.release
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range events {
		s.events = append(s.events, e.DeepCopy())
	}
	return true
}

func (s *sink) Run(<-chan struct{}) error { return nil }
func (s *sink) Shutdown()                 {}
func (s *sink) String() string            { return "sink" }

// auditedContext returns the context of a request with an audit level.
func auditedContext(t *testing.T, to audit.Sink, level auditinternal.Level, omitManaged bool) context.Context {
	t.Helper()
	ctx := audit.WithAuditContext(t.Context())
	if err := audit.AuditContextFrom(ctx).Init(audit.RequestAuditConfig{
		Level:             level,
		OmitManagedFields: omitManaged,
	}, to); err != nil {
		t.Fatal(err)
	}
	return ctx
}

// loggedEvent returns the request's event in JSON.
func loggedEvent(t *testing.T, ctx context.Context, s *sink) string {
	t.Helper()
	audit.AuditContextFrom(ctx).ProcessEventStage(ctx, auditinternal.StageResponseComplete)
	data, err := json.Marshal(s.events[len(s.events)-1])
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// If a backend hangs, the queue stays within its bounds, in events and in bytes. An event that does not fit is
// truncated first. All reservations are released in the end.
func TestTheQueueIsBounded(t *testing.T) {
	backend := &sink{release: make(chan struct{})}
	b := newBoundedQueue(
		backend,
		pluginbuffered.BatchConfig{BufferSize: 10, MaxBatchSize: 1, AsyncDelegate: true},
		20<<10,
	)
	stop := make(chan struct{})
	if err := b.Run(stop); err != nil {
		t.Fatal(err)
	}
	large := &auditinternal.Event{RequestObject: &runtime.Unknown{
		ContentType: runtime.ContentTypeJSON,
		Raw:         []byte(`"` + strings.Repeat("x", 8<<10) + `"`),
	}}
	for range 100 {
		b.ProcessEvents(large)
	}
	if n := b.outstanding(); n > 11 || b.usedBytes > 20<<10 || n < 3 {
		t.Errorf("%d events of %d bytes are held", n, b.usedBytes)
	}
	close(backend.release)
	close(stop)
	b.Shutdown()
	if b.outstanding() != 0 || b.usedBytes != 0 {
		t.Errorf("%d events of %d bytes are still reserved", b.outstanding(), b.usedBytes)
	}
	whole, truncated := 0, 0
	for _, e := range backend.events {
		if e.RequestObject != nil {
			whole++
		} else if e.Annotations["audit.k8s.io/truncated"] == "true" {
			truncated++
		}
	}
	if whole != 2 || truncated < 1 || whole+truncated != len(backend.events) {
		t.Errorf("%d events are whole and %d without objects, of %d", whole, truncated, len(backend.events))
	}
}

// A queue that is smaller than a batch loses no event while its backend is fast enough.
func TestASmallQueueOfLargeBatchesLosesNothing(t *testing.T) {
	backend := &sink{}
	b := newBoundedQueue(
		backend,
		pluginbuffered.BatchConfig{BufferSize: 10, MaxBatchSize: 40, MaxBatchWait: time.Minute},
		1<<20,
	)
	stop := make(chan struct{})
	if err := b.Run(stop); err != nil {
		t.Fatal(err)
	}
	for range 2000 {
		b.ProcessEvents(&auditinternal.Event{})
		reloadtest.Until(t, "there is room", func() bool { return b.outstanding() < 45 })
	}
	close(stop)
	b.Shutdown()
	if len(backend.events) != 2000 {
		t.Errorf("%d of 2000 events are written", len(backend.events))
	}
}

func TestRegistryAuditContextIsRecorded(t *testing.T) {
	auditContext := &commonv1.AuditContext{
		Annotations:   map[string]string{"a": "b"},
		Object:        &commonv1.ObjectReference{Name: "n", Namespace: "x", Uid: "u", ResourceVersion: "7"},
		RequestObject: []byte(`{"metadata":{"name":"n","managedFields":[{"manager":"m"}]}}`),
		Status:        []byte(`{"status":"Success","code":200}`),
	}
	body := []byte(
		`{"kind":"Table","items":[{"metadata":{"name":"i","managedFields":[]}}],` +
			`"rows":[{"object":{"metadata":{"managedFields":[]}}}]}`,
	)
	for level, want := range map[auditinternal.Level][]string{
		auditinternal.LevelNone:     {},
		auditinternal.LevelMetadata: {`"Name":"n"`, `"UID":"u"`, `"a":"b"`, `"Success"`},
		auditinternal.LevelRequest:  {`"Name":"n"`, `"a":"b"`, `"metadata":{"name":"n"`},
		auditinternal.LevelRequestResponse: {
			`"metadata":{"name":"n"`, `"items":[{"metadata":{"name":"i"`,
		},
	} {
		for _, omit := range []bool{false, true} {
			s := &sink{}
			ctx := auditedContext(t, s, level, omit)
			RecordContext(ctx, auditContext, "", nil)
			RecordResponse(ctx, "application/json;charset=utf-8", body)
			got := loggedEvent(t, ctx, s)
			for _, w := range want {
				if !strings.Contains(got, w) {
					t.Errorf("%s: %s is not in %s", level, w, got)
				}
			}
			objects := level == auditinternal.LevelRequest || level == auditinternal.LevelRequestResponse
			if strings.Contains(got, "managedFields") != (objects && !omit) {
				t.Errorf("%s, without managedFields %v: %s", level, omit, got)
			}
			if !objects && strings.Contains(got, `"items"`) {
				t.Errorf("%s: %s", level, got)
			}
		}
	}
	RecordContext(t.Context(), auditContext, "", nil) // a request without an audit context
	if Level(t.Context()) != commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED || IncludesResponse(t.Context()) {
		t.Error("a request without an audit context is audited")
	}
}

// A deeply nested object does not change, and removing managedFields from it takes no longer.
func TestDeepObjectIsUnchanged(t *testing.T) {
	deep := strings.Repeat(`{"rows":[{"object":`, 3000) + `{}` + strings.Repeat(`}]}`, 3000)
	if got := withoutManagedFields([]byte(deep)); len(got) != len(deep) {
		t.Errorf("%d bytes of %d are left", len(got), len(deep))
	}
	for _, odd := range []string{`[]`, `{"items":[null,1]}`, `{"items":null}`, `{"metadata":null}`,
		`{"items":[null]}`} {
		if got := withoutManagedFields([]byte(odd)); string(got) != odd {
			t.Errorf("%s became %s", odd, got)
		}
	}
}

// An event that its file rejects is written without its objects. sizeOf counts the bytes of all its parts.
func TestALargeEventIsWrittenShort(t *testing.T) {
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy")
	reloadtest.Replace(t, policy, "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: RequestResponse}]\n")
	a, err := New(t.Context(), configOf(t, "--audit-policy-file="+policy, "--audit-log-path="+dir+"/log",
		"--audit-log-maxsize=1"), nil, &reload.Files{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	large := strings.Repeat("x", 2<<20)
	for _, e := range []*auditinternal.Event{
		{AuditID: "object", ResponseObject: &runtime.Unknown{
			ContentType: runtime.ContentTypeJSON,
			Raw:         []byte(`"` + large + `"`),
		}},
		{AuditID: "status", ResponseStatus: &metav1.Status{
			Message: large,
			Details: &metav1.StatusDetails{Name: large, Causes: []metav1.StatusCause{{Message: large}}},
		}, ObjectRef: &auditinternal.ObjectReference{Name: large}},
	} {
		if sizeOf(e) < 2<<20 {
			t.Errorf("%s counts %d bytes", e.AuditID, sizeOf(e))
		}
		if !a.Sink.ProcessEvents(e) {
			t.Errorf("%s is not written", e.AuditID)
		}
	}
	data, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil || strings.Count(string(data), "\n") != 2 ||
		strings.Count(string(data), `"audit.k8s.io/truncated":"true"`) != 2 {
		t.Errorf("%.500s %v", data, err)
	}
}

// An event can be written with any patch.
func TestAPatchIsWritten(t *testing.T) {
	for patch, want := range map[string]string{
		`{"a": 1}`:         `{"a": 1}`,
		"a: 1\nb: [x, z]":  `{"a":1,"b":["x","z"]}`,
		`{`:                `"{"`,
		"":                 `null`,
		"a: 1\na: 2":       `"a: 1\na: 2"`,
		"\xff\xfe":         ``,
		"a: &x y\nb: [*x]": `"a: \u0026x y\nb: [*x]"`,
		"\x00":             ``,
		"- - - - {{{{{{ :": ``,
	} {
		got := patchJSON("application/apply-patch+yaml", []byte(patch))
		if !json.Valid(got) || want != "" && string(got) != want {
			t.Errorf("%q is written as %s, not %s", patch, got, want)
		}
	}
	for patch, want := range map[string]string{
		"\xa1\x61a\x01":                   `{"a":1}`,
		"\xc4\xa1\x67a: 2\n#:\x61b":       `{"a: 2\n#:":"b"}`, // it is YAML too
		`{"a": 1}`:                        `"{\"a\": 1}"`,
		"\xa1\x61a\x01, and further text": ``,
	} {
		got := patchJSON("application/apply-patch+cbor; charset=x", []byte(patch))
		if !json.Valid(got) || want != "" && string(got) != want {
			t.Errorf("CBOR %q is written as %s, not %s", patch, got, want)
		}
	}
}

// Protobuf is recorded in the JSON that kube-apiserver would write.
func TestProtobufIsRecordedAsJSON(t *testing.T) {
	in := func(obj runtime.Object) []byte {
		var b strings.Builder
		if err := protobuf.NewSerializer(protobufScheme(), protobufScheme()).Encode(obj, &b); err != nil {
			t.Fatal(err)
		}
		return []byte(b.String())
	}
	meta := metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMapList"}
	for want, obj := range map[string]runtime.Object{
		`"items":[]`: &corev1.ConfigMapList{TypeMeta: meta},
		`"data":{"k":"v"}`: &corev1.ConfigMapList{TypeMeta: meta, Items: []corev1.ConfigMap{{
			Data: map[string]string{"k": "v"},
		}}},
		`"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1"`: &metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
			Items:    []metav1.PartialObjectMetadata{{}},
		},
		`"reason":"NotFound"`: &metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Reason:   metav1.StatusReasonNotFound,
		},
	} {
		got, err := toJSON(runtime.ContentTypeProtobuf, in(obj))
		if err != nil || !strings.Contains(string(got), want) {
			t.Errorf("%s, %v: not %s", got, err, want)
		}
	}
	if got, err := toJSON(runtime.ContentTypeYAML, []byte("a: [1]\n")); err != nil || string(got) != `{"a":[1]}` {
		t.Errorf("%s %v", got, err)
	}
	for _, bad := range []string{"", "k8s\x00", "rubbish"} {
		if _, err := toJSON(runtime.ContentTypeProtobuf, []byte(bad)); err == nil {
			t.Errorf("%q is recorded", bad)
		}
	}
}

func configOf(t *testing.T, flags ...string) *Config {
	t.Helper()
	c := &Config{}
	fs := pflag.NewFlagSet("audit", pflag.ContinueOnError)
	c.AddFlags(fs)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	return c
}

// An invalid flag stops the start with a single line that names the flag. Flags of a disabled backend are not
// validated.
func TestABadSettingNamesItsFlag(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad")
	if err := os.WriteFile(bad, []byte("rules: 7"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, flags := range [][]string{
		{"--audit-log-mode=odd"}, {"--audit-log-format=odd"}, {"--audit-log-maxage=-1"}, {"--audit-log-version=v1"},
		{"--audit-log-truncate-max-batch-size=7"}, {"--audit-log-truncate-max-event-size=0"},
		{"--audit-log-batch-buffer-bytes=0", "--audit-log-mode=batch"},
		{"--audit-policy-file=/none"}, {"--audit-policy-file=" + bad},
	} {
		name, _, _ := strings.Cut(flags[0], "=")
		_, err := New(t.Context(), configOf(t, append(flags, "--audit-log-path="+dir+"/log")...), nil, &reload.Files{})
		if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", flags, err)
		}
	}
	if err := configOf(t, "--audit-webhook-mode=odd").Validate(); err != nil {
		t.Errorf("a webhook that is not used: %v", err)
	}
	a, err := New(t.Context(), configOf(t, "--audit-log-path="+dir+"/log"), nil, &reload.Files{})
	if err != nil || a.Sink != nil || a.Policy != nil {
		t.Errorf("without a policy: %v, %v", a, err)
	}
	a.Close()
}

// A policy is reloaded. An invalid policy does not replace the current policy.
func TestPolicyIsReloaded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "policy")
	policy := func(level string) {
		reloadtest.Replace(t, path, "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: "+level+"}]\n")
	}
	policy("Metadata")
	files := &reload.Files{}
	a, err := New(t.Context(), configOf(t, "--audit-policy-file="+path, "--audit-log-path="+dir+"/log"), nil, files)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	reloadtest.Watch(t, files)
	level := func() auditinternal.Level { return a.Policy.EvaluatePolicyRule(authorizer.AttributesRecord{}).Level }
	policy("Request")
	reloadtest.Until(t, "the new policy is in force", func() bool { return level() == auditinternal.LevelRequest })
	policy("Odd")
	reloadtest.WaitForPage(t, files, "[-]audit-policy-file")
	if level() != auditinternal.LevelRequest {
		t.Errorf("a bad policy is in force: %s", level())
	}
	ctx := auditedContext(t, a.Sink, level(), false)
	audit.AuditContextFrom(ctx).SetEventResponseStatusCode(http.StatusTeapot)
	audit.AuditContextFrom(ctx).ProcessEventStage(ctx, auditinternal.StageResponseComplete)
	data, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil || !strings.Contains(string(data), `"code":418`) || strings.Count(string(data), "\n") != 1 {
		t.Errorf("%s %v", data, err)
	}
}

// limitedFile fails a write after a number of bytes, as a full disk does.
type limitedFile struct {
	*os.File
	free int
}

func (f *limitedFile) Write(b []byte) (int, error) {
	n, err := f.File.Write(b[:min(len(b), f.free)])
	f.free -= n
	if err == nil && n < len(b) {
		err = syscall.ENOSPC
	}
	return n, err
}

// A part of a line, which a killed server or a full disk leaves, does not damage the next event's line.
func TestAnEventBeginsItsOwnLine(t *testing.T) {
	for _, maxSize := range []int{0, 1} {
		path := filepath.Join(t.TempDir(), "audit.log")
		if err := os.WriteFile(path, []byte("whole\npart of the killed ser"), 0o600); err != nil {
			t.Fatal(err)
		}
		w, err := (&LogConfig{Path: path, MaxSize: maxSize}).open()
		if err != nil {
			t.Fatal(err)
		}
		write := func(line string) error {
			_, err := w.Write([]byte(line))
			return err
		}
		if err := write("first\n"); err != nil {
			t.Fatal(err)
		}
		disk, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer disk.Close()
		full := &limitedFile{disk, 3}
		w.(*lineWriter).out = full
		if write("second\n") == nil || write("third\n") == nil {
			t.Error("a full disk has no error")
		}
		if full.free = 1; write("lost\n") == nil { // the line break alone is written
			t.Error("a full disk has no error")
		}
		full.free = 100
		if err := write("fourth\n"); err != nil {
			t.Fatal(err)
		}
		got, _ := os.ReadFile(path)
		if want := "whole\npart of the killed ser\nfirst\nsec\nfourth\n"; string(got) != want {
			t.Errorf("max size %d: %q", maxSize, got)
		}
	}
}
