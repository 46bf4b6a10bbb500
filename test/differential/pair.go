package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// repeated marks a request that a side received several times. Only the last response counts.
	repeated bool
	// lost marks a write that succeeded without a response, so nothing of it is compared.
	lost bool
	// pathOf returns a path that differs between the sides, nil for path.
	pathOf func(s *side) string
	// pages is the number of pages of a list before this request.
	pages int
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
	// clients are the clients with other certificates, or with HTTP/2.
	clients map[clientKey]*http.Client
	// seen are the resource versions and UIDs of objects by path, because later requests may use them.
	seen map[string]identity
}

type identity struct{ version, uid string }

type clientKey struct {
	*certificate
	http2 bool
}

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
		clients: map[clientKey]*http.Client{{nil, true}: newClient(tlsConfig.Clone(), true)},
		client:  newClient(tlsConfig, false),
	}
}

func newClient(c *tls.Config, http2 bool) *http.Client {
	transport := &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: http2, DisableCompression: true}
	if !http2 { // opens several connections, as many clients do
		c.NextProtos = []string{"http/1.1"}
		transport.MaxIdleConnsPerHost = 8
		transport.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	return &http.Client{Timeout: 45 * time.Second, Transport: transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// clientOf returns a client with a certificate, or the administrator's client for nil.
func (s *side) clientOf(c *certificate, http2 bool) *http.Client {
	if c == nil && !http2 {
		return s.client
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := clientKey{c, http2}
	if s.clients[key] == nil {
		// The server's certificate is not compared, so any certificate is accepted.
		s.clients[key] = newClient(&tls.Config{InsecureSkipVerify: true, Certificates: c.chain}, http2)
	}
	return s.clients[key]
}

// transport returns the protocol of a request, and whether its client accepts gzip. The request determines both, so
// both servers receive the same.
func (r *request) transport() (http2, gzip bool) {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(r.method + r.path + r.about))
	n := hash.Sum32()
	for name := range r.header {
		if name == "Connection" || name == "Upgrade" { // only HTTP/1.1 has them
			return false, false
		}
	}
	return n&1 != 0, n&2 != 0
}

// answer is a server's response.
type answer struct {
	code   int
	header http.Header
	body   []byte
	err    error
	// repeated and lost are the request's fields of these names.
	repeated, lost bool
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

// again matches the body of a failed request that a pause of the machine explains.
var again = regexp.MustCompile("etcdserver: (request timed out|leader changed)")

// do sends a request, and repeats it up to ten times. After a pause of the machine, a server rejects requests until its
// policy is fresh again. A request of etcd times out after 7 s, and etcd may have made that write.
func (s *side) do(ctx context.Context, r *request) answer {
	unknown := false
	for attempt := 0; ; attempt++ {
		a := s.once(ctx, r)
		a.repeated = attempt > 0
		timedOut := a.code == http.StatusInternalServerError && again.Match(a.body)
		if unknown && !timedOut && r.method != http.MethodGet &&
			(r.method == http.MethodDelete || a.code == http.StatusConflict || a.code == http.StatusNotFound) {
			return s.lost(ctx, r, a)
		}
		rejected := (a.code == http.StatusTooManyRequests || a.code == http.StatusServiceUnavailable) &&
			a.header.Get("Retry-After") == "1"
		if !timedOut && !rejected || attempt == 10 {
			return a
		}
		fmt.Printf("%s: %s is sent again after %d: %.200s\n", s.name, r, a.code, a.body)
		unknown = unknown || timedOut
		select {
		case <-ctx.Done():
			return a
		case <-time.After(time.Second):
		}
	}
}

// lost returns the answer of a write whose first attempt succeeded without a response. a is the response of the last
// attempt, which found the result of the first. lost remembers the object, because later requests have its version.
func (s *side) lost(ctx context.Context, r *request, a answer) answer {
	fmt.Printf("%s: the response to %s is lost\n", s.name, r)
	var status metav1.Status
	path, _, _ := strings.Cut(r.path, "?")
	if r.method == http.MethodPost && json.Unmarshal(a.body, &status) == nil && status.Details != nil {
		path += "/" + status.Details.Name
	}
	if r.method != http.MethodDelete {
		accept := map[string]string{"Accept": "application/json"}
		s.once(ctx, &request{method: http.MethodGet, path: path, header: accept})
	}
	code := http.StatusOK
	if r.method == http.MethodPost {
		code = http.StatusCreated
	}
	return answer{code: code, repeated: true, lost: true}
}

// once sends a request.
func (s *side) once(ctx context.Context, r *request) answer {
	body := []byte(s.fill(string(r.body)))
	if r.bodyOf != nil {
		body = r.bodyOf(s)
	}
	path := s.fill(r.path)
	if r.pathOf != nil {
		path = r.pathOf(s)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, s.base+path, bytes.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	if len(body) == 0 {
		req.Body, req.ContentLength = nil, 0
	}
	req.Header.Set("User-Agent", "differential/v1 (linux)")
	http2, gzip := r.transport()
	if gzip {
		req.Header.Set("Accept-Encoding", "gzip")
	}
	for k, v := range r.header {
		req.Header.Set(k, v)
	}
	if r.more != nil {
		for k, v := range r.more(s) {
			req.Header[k] = v
		}
	}
	resp, err := s.clientOf(r.as, http2).Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	said, err := readBody(resp)
	a := answer{code: resp.StatusCode, header: resp.Header, body: said, err: err}
	s.remember(r, a)
	return a
}

// readBody returns the body of a response, without its compression.
func readBody(resp *http.Response) ([]byte, error) {
	if resp.Header.Get("Content-Encoding") != "gzip" {
		return io.ReadAll(resp.Body)
	}
	z, err := gzip.NewReader(resp.Body)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
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
	// follows uses continue tokens and resource versions of lists in further requests.
	follows bool
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

// presence headers must be present on both sides or on neither. All other headers must have equal values.
var presence = []string{"Audit-Id", "Date", "Process-Start-Time-Unix", "X-Kubernetes-Pf-Flowschema-Uid",
	"X-Kubernetes-Pf-Prioritylevel-Uid"}

// notCompared are headers that the HTTP library sets by the size of the body, which differs between any two servers.
var notCompared = []string{"Content-Length"}

// ask sends a request to both servers, compares the responses and returns kube-apiserver's.
func (p *pair) ask(r *request) answer {
	ctx, cancel := context.WithTimeout(p.t.Context(), harness.Soon)
	defer cancel()
	if p.audited {
		r = p.withAuditID(r)
	}
	a, b := p.both(ctx, r)
	for range behindTries {
		if p.audited || !strings.Contains(r.path, "resourceVersionMatch=NotOlderThan") || len(diff(a, b)) == 0 {
			break
		}
		time.Sleep(behindPause) // either server may respond with slightly old state
		a, b = p.both(ctx, r)
	}
	p.report.compare(r, a, b)
	if p.follows && !strings.Contains(r.path, "/ipaddresses") { // whose names, and so their pages, are random
		p.follow(r, a, b)
	}
	return a
}

// maxPages bounds the pages of a list that follow its first.
const maxPages = 2

// follow uses the continue token and the resource version of a list in further requests, because their values differ
// between any two servers.
func (p *pair) follow(r *request, a, b answer) {
	if r.method != http.MethodGet || a.code != http.StatusOK || b.code != http.StatusOK {
		return
	}
	theirs, ours := listMetaOf(a), listMetaOf(b)
	http2, _ := r.transport()
	switch base, query, _ := strings.Cut(r.path, "?"); {
	case theirs.Continue != "" && ours.Continue != "" && r.pages < maxPages:
		next := *r
		next.pages++
		next.about = fmt.Sprintf("%s, page %d", r.about, next.pages+1)
		next.pathOf = func(s *side) string {
			q, _ := url.ParseQuery(s.fill(query))
			q.Del("resourceVersion")
			q.Del("resourceVersionMatch")
			q.Set("continue", p.pick(s, theirs, ours).Continue)
			return s.fill(base) + "?" + q.Encode()
		}
		p.ask(&next)
	case http2 && theirs.ResourceVersion != "" && ours.ResourceVersion != "" && query == "" && r.pathOf == nil:
		exact := *r
		exact.about += ", at its resource version"
		exact.pathOf = func(s *side) string {
			return base + "?resourceVersionMatch=Exact&resourceVersion=" + p.pick(s, theirs, ours).ResourceVersion
		}
		p.ask(&exact)
	}
}

func (p *pair) pick(s *side, theirs, ours metav1.ListMeta) metav1.ListMeta {
	if s == p.theirs {
		return theirs
	}
	return ours
}

// listMetaOf returns the metadata of a list in JSON, or zero.
func listMetaOf(a answer) metav1.ListMeta {
	var list struct {
		Metadata metav1.ListMeta
		Items    []struct{}
	}
	if json.Unmarshal(a.body, &list) != nil || list.Items == nil {
		return metav1.ListMeta{}
	}
	return list.Metadata
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
	p.repeats(r, a, b)
	return a, b
}

// repeats marks a request that a side repeated.
func (p *pair) repeats(r *request, a, b answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.repeated = r.repeated || a.repeated || b.repeated
	r.lost = r.lost || a.lost || b.lost
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
func diff(a, b answer) []string {
	if a.err != nil || b.err != nil {
		return []string{fmt.Sprintf("error: %v | %v", a.err, b.err)}
	}
	if a.code != b.code { // another response: its headers and its body differ too
		return []string{fmt.Sprintf("code: %s | %s", a.outcome(), b.outcome())}
	}
	var out []string
	all := maps.Clone(a.header)
	maps.Copy(all, b.header)
	for _, h := range slices.Sorted(maps.Keys(all)) {
		x, y := header(a.header, h), header(b.header, h)
		same := sameText(x, y)
		if slices.Contains(presence, h) {
			same = (x == "") == (y == "")
		}
		if !same && !slices.Contains(notCompared, h) {
			out = append(out, fmt.Sprintf("header %s: %q | %q", h, x, y))
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
