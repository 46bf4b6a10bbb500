package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"watershed.dev/test/harness"
)

// auditPolicy writes a policy that records every request at a level, and returns its path.
func auditPolicy(t *testing.T, dir, level string) string {
	t.Helper()
	path := filepath.Join(dir, "audit-policy.yaml")
	text := "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n- level: " + level + "\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// audited returns the audit IDs of completed requests below an API path, and how often the log's files record each. A
// killed server may leave a part of a line, which records nothing.
func audited(t *testing.T, pattern, uri string) map[string]int {
	t.Helper()
	ids := map[string]int{}
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(data) {
			var e struct{ AuditID, Stage, RequestURI string }
			if !bytes.HasSuffix(line, []byte("\n")) {
				continue
			}
			if err := json.Unmarshal(line, &e); err != nil {
				t.Errorf("%s: a line is not an event: %.200s", f, line)
			}
			if e.Stage == "ResponseComplete" && strings.HasPrefix(e.RequestURI, uri) {
				ids[e.AuditID]++
			}
		}
	}
	return ids
}

const someMaps = "/api/v1/namespaces/default/configmaps"

// create creates n config maps and returns the audit IDs of the acknowledged requests. made counts them meanwhile.
func create(t *testing.T, s *harness.Server, n, bytes int, made *atomic.Int64) []string {
	t.Helper()
	config := s.Config()
	c, err := harness.HTTPClient(config)
	if err != nil {
		t.Error(err)
		return nil
	}
	var mu sync.Mutex
	var ids []string
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < n; i += 8 {
				body := fmt.Sprintf(
					`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"c"},"data":{"k":%q}}`,
					strings.Repeat("x", bytes),
				)
				harness.TryWrite(t, func() error {
					resp, err := c.Post(config.Host+someMaps, "application/json", strings.NewReader(body))
					if err != nil {
						return nil // the server is down
					}
					defer resp.Body.Close()
					answer, err := io.ReadAll(resp.Body)
					if resp.StatusCode == http.StatusCreated {
						mu.Lock()
						defer mu.Unlock()
						ids = append(ids, resp.Header.Get("Audit-Id"))
						made.Add(1)
					} else if err == nil {
						return harness.Failure(resp.StatusCode, string(answer))
					}
					return nil
				})
			}
		})
	}
	wg.Wait()
	return ids
}

// TestTheAuditLogHasEveryAcknowledgedRequest checks that the rotated log of a killed server records every acknowledged
// request exactly once.
func TestTheAuditLogHasEveryAcknowledgedRequest(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	s := harness.Up(t, "", "--audit-policy-file="+auditPolicy(t, dir, "RequestResponse"),
		"--audit-log-path="+filepath.Join(dir, "audit.log"), "--audit-log-maxsize=1", "--audit-log-maxbackup=0")
	acknowledged := make(chan []string)
	var made atomic.Int64
	go func() { acknowledged <- create(t, s, 4000, 1000, &made) }()
	harness.Eventually(t, harness.Soon, func() error { // it has been rotated, while requests continue
		files, _ := filepath.Glob(filepath.Join(dir, "audit*.log"))
		if n := made.Load(); len(files) < 2 || n < 100 { // a slow start also fills a log
			return fmt.Errorf("%d requests, and the log was not rotated: %q", n, files)
		}
		return nil
	})
	s.Kill()
	ids := <-acknowledged
	if len(ids) < 100 || len(ids) == 4000 {
		t.Fatalf("%d requests were acknowledged before the server was killed", len(ids))
	}
	got := audited(t, filepath.Join(dir, "audit*.log"), someMaps)
	for _, id := range ids {
		if got[id] != 1 {
			t.Errorf("request %s is recorded %d times", id, got[id])
		}
	}
}

var auditErrors = regexp.MustCompile(`(?m)^apiserver_audit_error_total\{plugin="(\w+)"\} (\d+)`)

// errorsOf returns the number of events that each audit backend could not record.
func errorsOf(s *harness.Server) map[string]int {
	_, page := s.Get("/metrics")
	out := map[string]int{}
	for _, m := range auditErrors.FindAllStringSubmatch(page, -1) {
		out[m[1]], _ = strconv.Atoi(m[2])
	}
	return out
}

// TestADeadAuditBackendCostsRequestsNothing checks that a hanging webhook and a full disk delay no request. Lost events
// are counted.
func TestADeadAuditBackendCostsRequestsNothing(t *testing.T) {
	hanging := make(chan struct{})
	hook := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hanging }))
	defer hook.Close()
	defer close(hanging)
	dir := harness.TempDir(t)
	config := filepath.Join(dir, "webhook.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u"}],
"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}]}`,
		hook.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	s := harness.Up(t, "", "--audit-policy-file="+auditPolicy(t, dir, "RequestResponse"), "--audit-log-path=/dev/full",
		"--audit-webhook-config-file="+config, "--audit-webhook-batch-max-wait=100ms",
		"--audit-webhook-batch-buffer-size=200", "--audit-webhook-batch-buffer-bytes=200000")
	if ids := create(t, s, 500, 2000, new(atomic.Int64)); len(ids) != 500 {
		t.Errorf("%d of 500 requests were answered", len(ids))
	}
	lost := errorsOf(s)
	if lost["log"] < 500 || lost["buffered"] < 300 {
		t.Errorf("lost events are not counted: %v", lost)
	}
}

// TestBlockingStrictRejectsUnrecordedRequests checks that blocking-strict rejects a request that cannot be recorded.
func TestBlockingStrictRejectsUnrecordedRequests(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n"+
		"- {level: Metadata, resources: [{group: \"\", resources: [configmaps]}]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := harness.Up(
		t,
		"",
		"--audit-policy-file="+policy,
		"--audit-log-path=/dev/full",
		"--audit-log-mode=blocking-strict",
	)
	if code, body := s.Get(someMaps); code != http.StatusInternalServerError ||
		!strings.Contains(body, "failed to store audit event") {
		t.Errorf("%d %s", code, body)
	}
	if code, _ := s.Get("/api/v1/namespaces"); code != http.StatusOK {
		t.Errorf("a request outside of the policy: %d", code)
	}
}
