package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// attempt is a run of one shape against one server: its clients, and the statuses that they saw.
type attempt struct {
	s      *subject
	client *http.Client
	// closers close the client's side of the shape's open connections.
	closers []func()
	// made are the paths of objects to delete at the end.
	made []string

	mu   sync.Mutex
	seen map[string]int
	// connections are the connections of the shape's HTTP/2 clients.
	connections []net.Conn
}

func newAttempt(s *subject) *attempt {
	a := &attempt{s: s, seen: map[string]int{}}
	a.client = a.newClient()
	return a
}

// newClient returns an HTTP/2 client with its own connections, which the shape closes at its end.
func (a *attempt) newClient() *http.Client {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		if err == nil {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.connections = append(a.connections, c)
		}
		return c, err
	}
	return &http.Client{
		Transport: &http.Transport{TLSClientConfig: a.s.tls("h2"), ForceAttemptHTTP2: true, DisableCompression: true,
			DialContext: dial},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	}
}

// newOldClient returns an HTTP/1.1 client that opens a connection for each request.
func newOldClient(s *subject) *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: s.tls("http/1.1"), DisableCompression: true,
		DisableKeepAlives: true, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}}
}

// rest closes the setup's idle connections.
func (a *attempt) rest() { a.client.CloseIdleConnections() }

// close closes all clients of the shape.
func (a *attempt) close() {
	for _, f := range a.closers {
		f()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.connections {
		c.Close()
	}
	a.client = a.newClient() // for undo
}

// undo deletes the shape's objects in reverse order.
func (a *attempt) undo() {
	ctx, cancel := context.WithTimeout(a.s.t.Context(), longest)
	defer cancel()
	for _, path := range slices.Backward(a.made) {
		_, text := a.send(ctx, request{as: admin, method: http.MethodDelete, path: path, body: []byte(
			`{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0,"propagationPolicy":"Background"}`),
			header: http.Header{"Content-Type": {jsonMedia}}})
		if bytes.Contains(text, []byte(`"finalizers":["example.com/`)) {
			_, _ = a.send(ctx, request{as: admin, method: http.MethodPatch, path: path,
				body: []byte(`{"metadata":{"finalizers":null}}`), header: http.Header{"Content-Type": {mergeMedia}}})
		}
	}
	a.client.CloseIdleConnections()
}

// saw records the outcome of a request: a status, "closed" or "no answer".
func (a *attempt) saw(outcome string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seen[outcome]++
}

// statuses returns the distinct outcomes.
func (a *attempt) statuses() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(a.seen)), ", ")
}

const (
	closed   = "closed"
	noAnswer = "no answer"
)

// failed classifies an error: the client's own deadline, or a connection or stream that the server closed.
func failed(err error) string {
	var timeout net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return noAnswer
	}
	return closed
}

// request is one HTTP request.
type request struct {
	as           sender
	method, path string
	header       http.Header
	body         []byte
	client       *http.Client
}

// send sends a request and reads the whole response. It returns the first megabyte of the body.
func (a *attempt) send(ctx context.Context, r request) (*http.Response, []byte) {
	req, err := http.NewRequestWithContext(ctx, r.method, "https://"+a.s.address()+r.path, bytes.NewReader(r.body))
	if err != nil {
		return nil, []byte(err.Error())
	}
	maps.Copy(req.Header, r.header)
	if r.as != anonymous {
		req.Header.Set("Authorization", "Bearer "+a.s.tokens[r.as])
	}
	c := r.client
	if c == nil {
		c = a.client
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, []byte(failed(err))
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
	}
	if err != nil {
		return nil, []byte(fmt.Sprintf("%d then %s", resp.StatusCode, failed(err)))
	}
	return resp, text
}

// ask sends a request and records its outcome. It returns the status and the start of the body, or 0 without a
// response.
func (a *attempt) ask(ctx context.Context, r request) (int, []byte) {
	resp, text := a.send(ctx, r)
	if resp == nil {
		a.saw(string(text))
		return 0, nil
	}
	a.saw(fmt.Sprint(resp.StatusCode))
	if os.Getenv("COST_ANSWERS") != "" {
		a.s.t.Logf("%s %.100s: %d %.300s", r.method, r.path, resp.StatusCode, text)
	}
	return resp.StatusCode, text
}

// get sends a GET for a path.
func (a *attempt) get(ctx context.Context, as sender, path string) (int, []byte) {
	return a.ask(ctx, request{as: as, method: http.MethodGet, path: path})
}

// write sends a body of a media type.
func (a *attempt) write(ctx context.Context, as sender, method, path, media string, body []byte) (int, []byte) {
	return a.ask(ctx, request{as: as, method: method, path: path, body: body, header: http.Header{
		"Content-Type": {media}}})
}

// create posts an object to a collection as JSON.
func (a *attempt) create(ctx context.Context, as sender, collection string, o object) (int, []byte) {
	return a.write(ctx, as, http.MethodPost, collection, jsonMedia, marshal(o))
}

// prepare creates an object as the administrator, and registers it for deletion. Any status but 201 is an error.
func (a *attempt) prepare(collection string, o object) error {
	ctx, cancel := context.WithTimeout(a.s.t.Context(), longest)
	defer cancel()
	resp, text := a.send(ctx, request{as: admin, method: http.MethodPost, path: collection, body: marshal(o),
		header: http.Header{"Content-Type": {jsonMedia}}})
	if resp == nil || resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s: %.300s", collection, text)
	}
	a.remove(collection + "/" + o["metadata"].(object)["name"].(string))
	return nil
}

// remove registers an object for deletion at the end.
func (a *attempt) remove(path string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.made = append(a.made, path)
}

// until requests a path as the administrator until the response contains a text.
func (a *attempt) until(path, text string) error {
	ctx, cancel := context.WithTimeout(a.s.t.Context(), longest)
	defer cancel()
	for {
		resp, body := a.send(ctx, request{as: admin, method: http.MethodGet, path: path})
		if resp != nil && resp.StatusCode == http.StatusOK && bytes.Contains(body, []byte(text)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s has no %q: %.300s", path, text, body)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// times calls f n times, at most parallel calls at once, until the context ends.
func times(ctx context.Context, n, parallel int, f func(i int)) {
	var g errgroup.Group
	g.SetLimit(parallel)
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error {
			f(i)
			return nil
		})
	}
	_ = g.Wait()
}

const (
	jsonMedia      = "application/json"
	yamlMedia      = "application/yaml"
	protobufMedia  = "application/vnd.kubernetes.protobuf"
	jsonPatchMedia = "application/json-patch+json"
	mergeMedia     = "application/merge-patch+json"
	strategicMedia = "application/strategic-merge-patch+json"
	applyMedia     = "application/apply-patch+yaml"
)

// object is a JSON object.
type object = map[string]any

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

const (
	configMaps = "/api/v1/namespaces/" + namespace + "/configmaps"
	pods       = "/api/v1/namespaces/" + namespace + "/pods"
	mine       = configMaps + "/mine"
)

// metadata returns an object's metadata with a name.
func metadata(name string) object { return object{"name": name} }

// configMap returns a ConfigMap with data.
func configMap(name string, data object) object {
	return object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(name), "data": data}
}

// many returns n values.
func many[T any](n int, f func(i int) T) []T {
	all := make([]T, n)
	for i := range all {
		all[i] = f(i)
	}
	return all
}

// keys returns an object of n keys with one value.
func keys(n int, value any) object {
	o := make(object, n)
	for i := range n {
		o[fmt.Sprintf("k%d", i)] = value
	}
	return o
}

// nested returns depth levels of an opening around a middle.
func nested(depth int, open, middle, end string) string {
	return strings.Repeat(open, depth) + middle + strings.Repeat(end, depth)
}
