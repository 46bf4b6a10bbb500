package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// request is a request that is sent to both servers.
type request struct {
	method, path string
	header       map[string]string
	body         []byte
	// more returns headers that differ between the sides. A header may occur several times.
	more func(s *side) http.Header
	// bodyOf returns a body that differs between the sides. If it is nil, body is sent.
	bodyOf func(s *side) []byte
	// as is the sender's client certificate, nil for the administrator's.
	as *certificate
	// repeated sends the request several times. Only the last response counts.
	repeated bool
	// mayFail makes two failed requests count as equal.
	mayFail bool
	// about describes the request in the report.
	about string
}

func (r *request) String() string { return r.method + " " + r.path }

// side is one of the two servers.
type side struct {
	name   string
	server *harness.Server
	client *http.Client
	base   string

	mu sync.Mutex
	// clients are the clients with other certificates.
	clients map[*certificate]*http.Client
	// seen are the resource versions and UIDs of objects by path, because later requests may use them.
	seen map[string]identity
}

type identity struct{ version, uid string }

func newSide(t testing.TB, name string, s *harness.Server) *side {
	c := s.Config()
	tlsConfig, err := rest.TLSConfigFor(c)
	if err != nil {
		t.Fatal(err)
	}
	return &side{
		name:    name,
		server:  s,
		base:    c.Host,
		seen:    map[string]identity{},
		clients: map[*certificate]*http.Client{},
		client:  newClient(tlsConfig),
	}
}

func newClient(c *tls.Config) *http.Client {
	c.NextProtos = []string{"http/1.1"} // opens several connections, as many clients do
	return &http.Client{Timeout: 45 * time.Second,
		Transport: &http.Transport{TLSClientConfig: c, MaxIdleConnsPerHost: 8,
			TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}, DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// clientOf returns a client with a certificate, or the administrator's client for nil.
func (s *side) clientOf(c *certificate) *http.Client {
	if c == nil {
		return s.client
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients[c] == nil {
		// The server's certificate is not compared, so any certificate is accepted.
		s.clients[c] = newClient(&tls.Config{InsecureSkipVerify: true, Certificates: c.chain})
	}
	return s.clients[c]
}

// answer is a server's response.
type answer struct {
	code   int
	header http.Header
	body   []byte
	err    error
}

// versionOf and uidOf return placeholders for the resource version and UID that each server has for an object.
func versionOf(path string) string { return "{{version " + path + "}}" }
func uidOf(path string) string     { return "{{uid " + path + "}}" }

var marks = regexp.MustCompile(`\{\{(version|uid) ([^}]+)\}\}`)

// fill replaces placeholders with the side's own values.
func (s *side) fill(text string) string {
	if !strings.Contains(text, "{{") {
		return text
	}
	return marks.ReplaceAllStringFunc(text, func(m string) string {
		kind := marks.FindStringSubmatch(m)
		s.mu.Lock()
		defer s.mu.Unlock()
		id := s.seen[kind[2]]
		if kind[1] == "uid" {
			return id.uid
		}
		return id.version
	})
}

func (s *side) do(ctx context.Context, r *request) answer {
	body := []byte(s.fill(string(r.body)))
	if r.bodyOf != nil {
		body = r.bodyOf(s)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, s.base+s.fill(r.path), bytes.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	if len(body) == 0 {
		req.Body, req.ContentLength = nil, 0
	}
	req.Header.Set("User-Agent", "differential/v1 (linux)")
	for k, v := range r.header {
		req.Header.Set(k, v)
	}
	if r.more != nil {
		for k, v := range r.more(s) {
			req.Header[k] = v
		}
	}
	resp, err := s.clientOf(r.as).Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	a := answer{code: resp.StatusCode, header: resp.Header, body: said, err: err}
	s.remember(r, a)
	return a
}

// remember stores the version and UID of the returned object.
func (s *side) remember(r *request, a answer) {
	if a.code >= 300 || !strings.Contains(a.header.Get("Content-Type"), "json") {
		return
	}
	var o struct {
		Metadata struct{ Name, Namespace, UID, ResourceVersion string }
	}
	if json.Unmarshal(a.body, &o) != nil || o.Metadata.UID == "" || o.Metadata.ResourceVersion == "" {
		return
	}
	path, _, _ := strings.Cut(r.path, "?")
	if r.method == http.MethodPost {
		path += "/" + o.Metadata.Name
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[strings.TrimSuffix(path, "/status")] = identity{o.Metadata.ResourceVersion, o.Metadata.UID}
}

// pair sends requests to both servers and compares the responses.
type pair struct {
	t            testing.TB
	ours, theirs *side
	report       *report
	inFlight     errgroup.Group
	// audited gives each request an audit ID, the same on both sides. sent maps that ID to the request.
	audited bool
	mu      sync.Mutex
	sent    map[string]*request
}

// askLater runs ask in the background, for requests that are independent of others.
func (p *pair) askLater(r *request) {
	p.inFlight.Go(func() error {
		p.ask(r)
		return nil
	})
}

// compared headers must have equal values. presence headers must be present on both sides or on neither.
var (
	compared = []string{"Content-Type", "Warning", "Retry-After", "Cache-Control", "Location",
		"Allow", "X-Content-Type-Options", "Www-Authenticate"}
	presence = []string{"Audit-Id", "X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid"}
)

// ask sends a request to both servers, compares the responses and returns kube-apiserver's.
func (p *pair) ask(r *request) answer {
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	if p.audited {
		r = p.withAuditID(r)
	}
	a, b := p.both(ctx, r)
	for range behindTries {
		if p.audited || !strings.Contains(r.path, "resourceVersionMatch=NotOlderThan") || len(diff(r, a, b)) == 0 {
			break
		}
		time.Sleep(behindPause) // either server may respond with slightly old state
		a, b = p.both(ctx, r)
	}
	p.report.compare(r, a, b)
	return a
}

// behindTries is the number of retries of a NotOlderThan list while the responses differ, behindPause apart.
const (
	behindTries = 10
	behindPause = 100 * time.Millisecond
)

// both sends a request to both servers in parallel.
func (p *pair) both(ctx context.Context, r *request) (a, b answer) {
	var wg sync.WaitGroup
	wg.Go(func() { a = p.theirs.do(ctx, r) })
	wg.Go(func() { b = p.ours.do(ctx, r) })
	wg.Wait()
	return a, b
}

// withAuditID returns a copy of a request with a new audit ID.
func (p *pair) withAuditID(r *request) *request {
	p.mu.Lock()
	defer p.mu.Unlock()
	marked := *r
	marked.header = maps.Clone(r.header)
	if marked.header == nil {
		marked.header = map[string]string{}
	}
	id := fmt.Sprintf("%s%d", auditIDs, len(p.sent))
	marked.header["Audit-Id"] = id
	if p.sent == nil {
		p.sent = map[string]*request{}
	}
	p.sent[id] = &marked
	return &marked
}

// diff returns the differences between two responses, in the form "path: theirs | ours".
func diff(r *request, a, b answer) []string {
	if a.err != nil || b.err != nil {
		if a.err != nil && b.err != nil && r.mayFail {
			return nil
		}
		return []string{fmt.Sprintf("error: %v | %v", a.err, b.err)}
	}
	if a.code != b.code { // another response: its headers and its body differ too
		return []string{fmt.Sprintf("code: %s | %s", a.outcome(), b.outcome())}
	}
	var out []string
	for _, h := range compared {
		if x, y := header(a.header, h), header(b.header, h); x != y {
			out = append(out, fmt.Sprintf("header %s: %q | %q", h, x, y))
		}
	}
	for _, h := range presence {
		if (a.header.Get(h) == "") != (b.header.Get(h) == "") {
			out = append(out, fmt.Sprintf("header %s: %q | %q", h, a.header.Get(h), b.header.Get(h)))
		}
	}
	x, y := decode(a), decode(b)
	return append(out, differences("", normal(x), normal(y))...)
}

// outcome returns the code and the message of a response. The message of audit records is the last stage's.
func (a answer) outcome() string {
	var message any = ""
	switch v := decode(a).(type) {
	case string:
		message = v
	case fields:
		message = v["message"]
	case []any:
		if len(v) > 0 {
			last, _ := v[len(v)-1].(fields)
			status, _ := last["responseStatus"].(fields)
			message = status["message"]
		}
	}
	if message == nil {
		return fmt.Sprint(a.code)
	}
	return strings.TrimSpace(fmt.Sprintf("%d %.600s", a.code, mask(fmt.Sprint(message))))
}

func header(h http.Header, name string) string {
	all := slices.Clone(h.Values(name))
	slices.Sort(all)
	return mask(strings.Join(all, " ; "))
}
