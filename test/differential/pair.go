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

// request is sent to both servers.
type request struct {
	method, path string
	header       map[string]string
	body         []byte
	// more are headers that are not the same for both; a header may come several times.
	more func(s *side) http.Header
	// bodyOf is the body where it is not the same for both; nil: body.
	bodyOf func(s *side) []byte
	// as is who sends it; nil: the administrator, by certificate.
	as *certificate
	// repeated: it is sent several times, of which the last one counts.
	repeated bool
	// mayFail: that neither answers compares as equal.
	mayFail bool
	// about is what it tries, for the report.
	about string
}

func (r *request) String() string { return r.method + " " + r.path }

// side is one server.
type side struct {
	name   string
	server *harness.Server
	client *http.Client
	base   string

	mu sync.Mutex
	// clients are those of other certificates.
	clients map[*certificate]*http.Client
	// seen are the resource versions and uids of objects, by path: a request may name them.
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
	c.NextProtos = []string{"http/1.1"} // more connections than one, as many clients have
	return &http.Client{Timeout: 45 * time.Second,
		Transport: &http.Transport{TLSClientConfig: c, MaxIdleConnsPerHost: 8,
			TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}, DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// clientOf is a client with a certificate; nil: the administrator's.
func (s *side) clientOf(c *certificate) *http.Client {
	if c == nil {
		return s.client
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients[c] == nil {
		// Either serves whatever it has; who it is is not what is compared.
		s.clients[c] = newClient(&tls.Config{InsecureSkipVerify: true, Certificates: c.chain})
	}
	return s.clients[c]
}

// answer is what a server said.
type answer struct {
	code   int
	header http.Header
	body   []byte
	err    error
}

// versionOf and uidOf stand in a request for what each server has of an object, by the object's path.
func versionOf(path string) string { return "{{version " + path + "}}" }
func uidOf(path string) string     { return "{{uid " + path + "}}" }

var marks = regexp.MustCompile(`\{\{(version|uid) ([^}]+)\}\}`)

// fill puts the side's own values in.
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

// remember keeps the version and uid of the object that was answered.
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

// pair asks both and compares.
type pair struct {
	t            testing.TB
	ours, theirs *side
	report       *report
	inFlight     errgroup.Group
	// audited: each request has an audit id of its own, the same for both; sent are the requests by it.
	audited bool
	mu      sync.Mutex
	sent    map[string]*request
}

// askLater is ask for what depends on nothing else.
func (p *pair) askLater(r *request) {
	p.inFlight.Go(func() error {
		p.ask(r)
		return nil
	})
}

// compared headers; of those in presence only whether they are there.
var (
	compared = []string{"Content-Type", "Warning", "Retry-After", "Cache-Control", "Location",
		"Allow", "X-Content-Type-Options", "Www-Authenticate"}
	presence = []string{"Audit-Id", "X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid"}
)

// ask sends a request to both and answers what kube-apiserver said.
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
		time.Sleep(behindPause) // either may answer as of a while ago, but not for ever
		a, b = p.both(ctx, r)
	}
	p.report.compare(r, a, b)
	return a
}

// behindTries is how often a list of "not older than" is asked again, behindPause apart, while the answers differ.
const (
	behindTries = 10
	behindPause = 100 * time.Millisecond
)

// both sends a request to both.
func (p *pair) both(ctx context.Context, r *request) (a, b answer) {
	var wg sync.WaitGroup
	wg.Go(func() { a = p.theirs.do(ctx, r) })
	wg.Go(func() { b = p.ours.do(ctx, r) })
	wg.Wait()
	return a, b
}

// withAuditID is a request that the audit log knows by an id.
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

// diff lists what differs between two answers: "where: theirs | ours".
func diff(r *request, a, b answer) []string {
	if a.err != nil || b.err != nil {
		if a.err != nil && b.err != nil && r.mayFail {
			return nil
		}
		return []string{fmt.Sprintf("error: %v | %v", a.err, b.err)}
	}
	var out []string
	if a.code != b.code {
		out = append(out, fmt.Sprintf("code: %d | %d", a.code, b.code))
	}
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

func header(h http.Header, name string) string {
	all := slices.Clone(h.Values(name))
	slices.Sort(all)
	return mask(strings.Join(all, " ; "))
}
