package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/test/robustness/history"
)

// workload runs the clients.
type workload struct {
	*truth
	url                                                            string
	config                                                         *rest.Config
	options                                                        options
	stop                                                           context.CancelFunc
	writers                                                        sync.WaitGroup
	readers                                                        sync.WaitGroup
	watchers                                                       sync.WaitGroup
	serial                                                         atomic.Int64
	writes, acknowledged, reads, events, resumes, relists, expired atomic.Int64
	// late and lateExpired count the watches of clients that resume late.
	late, lateExpired atomic.Int64
	// delivered is the latest revision that a watch has received, so the log has it.
	delivered, compactions atomic.Int64
	// scaled counts the times that kube-controller-manager made a Deployment's pods.
	scaled       atomic.Int64
	complaintsMu sync.Mutex
	complaints   []history.Contradiction
}

func newWorkload(ctx context.Context, c *cluster, o options) (*workload, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.dir+"/admin.kubeconfig")
	if err != nil {
		return nil, err
	}
	w := &workload{url: c.url(), config: config, options: o}
	if w.truth, err = tailEtcd(ctx, c, resources(o)); err != nil {
		return nil, err
	}
	body := `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"` + namespace + `"}}`
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		code, answer, err := w.do(ctx, w.client(), "POST", "/api/v1/namespaces", "", body)
		if err == nil && (code == http.StatusCreated || code == http.StatusConflict) {
			return w, nil
		}
		// Of several servers on the port, some may not be ready yet.
		if ctx.Err() != nil || time.Now().After(deadline) {
			return nil, fmt.Errorf("create the namespace: %d %s %v", code, answer, err)
		}
	}
}

// client returns an HTTP client with its own connections, as separate processes have.
func (w *workload) client() *http.Client {
	cert, err := tls.X509KeyPair(w.config.CertData, w.config.KeyData)
	if err != nil {
		panic(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(w.config.CAData)
	var dial func(context.Context, string, string) (net.Conn, error)
	if w.options.placement == mixed {
		dial = dialForAWhile
	}
	return &http.Client{Transport: &http.Transport{
		DialContext:       dial,
		TLSClientConfig:   &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool},
		ForceAttemptHTTP2: true,
		HTTP2:             &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 5 * time.Second},
	}}
}

// dialForAWhile closes the connection after 2 to 20 s. The next connection may have another API server.
func dialForAWhile(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err == nil {
		time.AfterFunc(time.Duration(2+rand.IntN(18))*time.Second, func() { conn.Close() })
	}
	return conn, err
}

func (w *workload) start(ctx context.Context) {
	ctx, w.stop = context.WithCancel(ctx)
	if w.options.placement == mixed {
		w.writers.Go(func() { w.scale(ctx) })
	}
	for i, x := range w.resources {
		random := func(n int) *rand.Rand { return rand.New(rand.NewPCG(w.options.seed, uint64(1000*i+n))) }
		for n := range x.writers {
			w.writers.Go(func() { w.write(ctx, x, random(100+n)) })
		}
		for n := range x.readers {
			w.readers.Go(func() { w.read(ctx, x, random(200+n)) })
		}
		for n := range x.late {
			w.readers.Go(func() { w.watchLate(ctx, x, random(300+n)) })
		}
		for n := range x.watchers {
			w.watchers.Go(func() { w.watch(x, n) })
		}
	}
}

func (w *workload) progress() string {
	return fmt.Sprintf("%d writes (%d acknowledged), %d reads, %d events, %d resumes, %d expired", w.writes.Load(),
		w.acknowledged.Load(), w.reads.Load(), w.events.Load(), w.resumes.Load(), w.expired.Load())
}

func (w *workload) counts() map[string]int {
	changes, segments := 0, 0
	for _, x := range w.resources {
		changes, segments = changes+len(x.history.Changes), segments+len(x.history.Segments)
	}
	return map[string]int{
		"writes":                     int(w.writes.Load()),
		"writes acknowledged":        int(w.acknowledged.Load()),
		"reads answered":             int(w.reads.Load()),
		"events delivered":           int(w.events.Load()),
		"watches resumed by clients": int(w.resumes.Load()),
		"watches expired (410)":      int(w.expired.Load()),

		"old watches resumed":                       int(w.late.Load()),
		"old watches expired (410)":                 int(w.lateExpired.Load()),
		"lists of watching clients":                 int(w.relists.Load()),
		"compactions of etcd":                       int(w.compactions.Load()),
		"deployments scaled":                        int(w.scaled.Load()),
		"changes in etcd":                           changes,
		"connections that watches were served over": segments,
	}
}

func (w *workload) complain(format string, args ...any) {
	w.complaintsMu.Lock()
	defer w.complaintsMu.Unlock()
	w.complaints = append(w.complaints, history.Contradiction{
		At:   w.resources[0].history.Now(),
		Text: fmt.Sprintf(format, args...),
	})
}

// finish stops readers and writers, and waits until every watch has reached the final revision. It returns the
// complaints.
func (w *workload) finish(ctx context.Context) []history.Contradiction {
	w.stop()
	w.writers.Wait()
	w.readers.Wait()
	end, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for _, x := range w.resources {
		err := w.writeFinal(end, x)
		revision := int64(1) // lets the watches end
		if err == nil {
			revision, err = w.truth.firstFinal(end, x)
		}
		if err != nil {
			w.complain("the cluster does not recover: %v", err)
		}
		x.final.Store(revision)
	}
	w.watchers.Wait()
	w.truth.client.Close()
	return w.complaints
}

// writeFinal writes the last change of each shard, and repeats it until it succeeds. Each watch receives such a change,
// or a bookmark after it, as its end.
func (w *workload) writeFinal(ctx context.Context, x *resource) error {
	for _, shard := range shards {
		h := history.Write{
			Verb:    "create",
			Key:     final(shard),
			Value:   final(shard),
			Begin:   x.history.Now(),
			Outcome: history.Acknowledged,
		}
		for {
			code, answer, err := w.do(ctx, w.client(), "POST", x.path, "", x.body(h.Key, h.Value, shard, 0))
			if code == http.StatusCreated || code == http.StatusConflict { // an earlier attempt may have created it
				break
			}
			if ctx.Err() != nil {
				return fmt.Errorf("create %s: %d %s %v", h.Key, code, answer, err)
			}
			time.Sleep(500 * time.Millisecond)
		}
		h.End = x.history.Now()
		x.history.Wrote(h)
	}
	return nil
}

// callTimeout is the timeout of a client's request.
const callTimeout = 15 * time.Second

func (w *workload) do(ctx context.Context, c *http.Client, method, path, contentType,
	body string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if contentType == "" {
		contentType = "application/json"
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := c.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, data, err
}

// write changes objects at random, each with the revision that the client saw last.
func (w *workload) write(ctx context.Context, x *resource, r *rand.Rand) {
	client := w.client()
	known := map[string]int64{}
	for ctx.Err() == nil {
		w.writeOne(client, x, r, known)
		time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
	}
}

func (w *workload) writeOne(client *http.Client, x *resource, r *rand.Rand, known map[string]int64) {
	key, value := x.key(r), fmt.Sprintf("v%d", w.serial.Add(1))
	shard := x.shardOf(key, r)
	h := history.Write{Key: key, Value: value}
	target := x.path + "/" + key
	var method, contentType, content string
	switch n, rv := r.IntN(10), known[key]; {
	case rv == 0 || n == 0:
		h.Verb, method, target, content = "create", "POST", x.path, x.body(key, value, shard, 0)
	case n < 5:
		h.Verb, h.Expect, method, content = "update", rv, "PUT", x.body(key, value, shard, rv)
	case n < 6:
		h.Verb, method, content = "update", "PUT", x.body(key, value, shard, 0)
	case n < 8 || x.stay:
		h.Verb, method, contentType = "patch", "PATCH", "application/merge-patch+json"
		content = fmt.Sprintf(`{"metadata":{"labels":{"shard":%q},"annotations":{"value":%q}}}`, shard, value)
	default:
		h.Verb, h.Value, h.Expect, method = "delete", "", rv, "DELETE"
		content = fmt.Sprintf(`{"preconditions":{"resourceVersion":"%d"}}`, rv)
	}
	h.Begin = x.history.Now()
	code, answer, err := w.do(context.Background(), client, method, target, contentType, content)
	h.End, h.Code = x.history.Now(), code
	switch {
	case err != nil || code >= 500 || code == 429:
		// Unknown: the write may have happened. A 429 means that it did not, but the checker accepts Unknown too.
	case code < 300:
		h.Outcome = history.Acknowledged
	default:
		h.Outcome = history.Refused
	}
	w.writes.Add(1)
	var o object
	_ = json.Unmarshal(answer, &o)
	if h.Outcome == history.Acknowledged {
		w.acknowledged.Add(1)
		if h.Verb != "delete" {
			h.Revision = o.revision()
			known[key] = h.Revision
			x.known.add(h.Revision)
		} else {
			delete(known, key)
		}
	}
	x.history.Wrote(h)
	if h.Outcome != history.Acknowledged { // read the object again
		switch i, code := w.get(client, x, key); code {
		case http.StatusOK:
			known[key] = i.Revision
		case http.StatusNotFound:
			delete(known, key)
		}
	}
}
