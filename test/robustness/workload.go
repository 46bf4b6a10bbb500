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
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/test/robustness/history"
)

const (
	namespace = "robust"
	objects   = 24
	path      = "/api/v1/namespaces/" + namespace + "/configmaps"
)

// shards are the label values between which objects move.
var shards = []string{"x", "y", "z"}

// workload runs the clients.
type workload struct {
	*truth
	history  *history.History
	url      string
	config   *rest.Config
	options  options
	stop     context.CancelFunc
	writers  sync.WaitGroup
	readers  sync.WaitGroup
	watchers sync.WaitGroup
	serial   atomic.Int64
	// final is the revision that every watch must reach; 0 until it is set.
	final                                                          atomic.Int64
	writes, acknowledged, reads, events, resumes, relists, expired atomic.Int64
	// delivered is the latest revision that a watch has received, so the log has it.
	delivered, compactions atomic.Int64
	// scaled counts the times that kube-controller-manager made a Deployment's pods.
	scaled       atomic.Int64
	complaintsMu sync.Mutex
	complaints   []string
}

func newWorkload(ctx context.Context, c *cluster, o options) (*workload, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.dir+"/admin.kubeconfig")
	if err != nil {
		return nil, err
	}
	w := &workload{history: history.New(), url: c.url(), config: config, options: o}
	if w.truth, err = tailEtcd(ctx, c, w.history); err != nil {
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
	for n := range w.options.writers {
		w.writers.Go(func() { w.write(ctx, rand.New(rand.NewPCG(w.options.seed, uint64(100+n)))) })
	}
	for n := range 4 {
		w.readers.Go(func() { w.read(ctx, rand.New(rand.NewPCG(w.options.seed, uint64(200+n)))) })
	}
	for n := range w.options.watchers {
		w.watchers.Go(func() { w.watch(n) })
	}
}

func (w *workload) progress() string {
	return fmt.Sprintf("%d writes (%d acknowledged), %d reads, %d events, %d resumes, %d expired", w.writes.Load(),
		w.acknowledged.Load(), w.reads.Load(), w.events.Load(), w.resumes.Load(), w.expired.Load())
}

func (w *workload) counts() map[string]int {
	return map[string]int{
		"writes":                     int(w.writes.Load()),
		"writes acknowledged":        int(w.acknowledged.Load()),
		"reads answered":             int(w.reads.Load()),
		"events delivered":           int(w.events.Load()),
		"watches resumed by clients": int(w.resumes.Load()),
		"watches expired (410)":      int(w.expired.Load()),

		"lists of watching clients":                 int(w.relists.Load()),
		"compactions of etcd":                       int(w.compactions.Load()),
		"deployments scaled":                        int(w.scaled.Load()),
		"changes in etcd":                           len(w.history.Changes),
		"connections that watches were served over": len(w.history.Segments),
	}
}

func (w *workload) complain(format string, args ...any) {
	w.complaintsMu.Lock()
	defer w.complaintsMu.Unlock()
	w.complaints = append(w.complaints, fmt.Sprintf(format, args...))
}

// finish stops readers and writers, and waits until every watch has reached the final revision. It returns the
// complaints.
func (w *workload) finish(ctx context.Context) []string {
	w.stop()
	w.writers.Wait()
	w.readers.Wait()
	end, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	last := map[string]*history.Write{}
	revision, err := w.truth.finish(end, func() error { // a last change that every watch receives, as its end
		for _, s := range shards {
			if last[s] == nil {
				last[s] = &history.Write{
					Verb:    "create",
					Key:     "final-" + s,
					Value:   "final-" + s,
					Begin:   w.history.Now(),
					Outcome: history.Acknowledged,
				}
			} else if last[s].End > 0 {
				continue
			}
			body := fmt.Sprintf(
				`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"final-%s","labels":{"shard":%q}},`+
					`"data":{"value":"final-%s"}}`, s, s, s)
			code, answer, err := w.do(end, w.client(), "POST", path, "", body)
			if code != http.StatusCreated && code != http.StatusConflict { // an earlier attempt may have created it
				return fmt.Errorf("%d %s %v", code, answer, err)
			}
			last[s].End = w.history.Now()
			w.history.Wrote(*last[s])
		}
		return nil
	})
	if err != nil {
		w.complain("the cluster does not recover: %v", err)
		revision = 1 // lets the watches end
	}
	w.final.Store(revision)
	w.watchers.Wait()
	return w.complaints
}

type object struct {
	Metadata struct {
		Name, ResourceVersion string
		Labels                map[string]string
		Annotations           map[string]string
		Continue              string
	}
	Data map[string]string
}

func (o *object) item() history.Item {
	rv, _ := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	return history.Item{Key: o.Metadata.Name, Revision: rv, Value: o.Data["value"], Shard: o.Metadata.Labels["shard"]}
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
func (w *workload) write(ctx context.Context, r *rand.Rand) {
	client := w.client()
	known := map[string]int64{}
	for ctx.Err() == nil {
		w.writeOne(client, r, known)
		time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
	}
}

func (w *workload) writeOne(client *http.Client, r *rand.Rand, known map[string]int64) {
	key := fmt.Sprintf("o%d", r.IntN(objects))
	value, shard := fmt.Sprintf("v%d", w.serial.Add(1)), shards[r.IntN(len(shards))]
	h := history.Write{Key: key, Value: value}
	body := func(rv int64) string {
		version := ""
		if rv > 0 {
			version = fmt.Sprintf(`"resourceVersion":"%d",`, rv)
		}
		return fmt.Sprintf(
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{%s"name":%q,"labels":{"shard":%q}},"data":{"value":%q}}`,
			version, key, shard, value)
	}
	var method, target, contentType, content string
	switch n, rv := r.IntN(10), known[key]; {
	case rv == 0 || n == 0:
		h.Verb, method, target, content = "create", "POST", path, body(0)
	case n < 5:
		h.Verb, h.Expect, method, target, content = "update", rv, "PUT", path+"/"+key, body(rv)
	case n < 6:
		h.Verb, method, target, content = "update", "PUT", path+"/"+key, body(0)
	case n < 8:
		h.Verb, method, target, contentType = "patch", "PATCH", path+"/"+key, "application/merge-patch+json"
		content = fmt.Sprintf(`{"metadata":{"labels":{"shard":%q}},"data":{"value":%q}}`, shard, value)
	default:
		h.Verb, h.Value, h.Expect, method, target = "delete", "", rv, "DELETE", path+"/"+key
		content = fmt.Sprintf(`{"preconditions":{"resourceVersion":"%d"}}`, rv)
	}
	h.Begin = w.history.Now()
	code, answer, err := w.do(context.Background(), client, method, target, contentType, content)
	h.End, h.Code = w.history.Now(), code
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
			h.Revision = o.item().Revision
			known[key] = h.Revision
		} else {
			delete(known, key)
		}
	}
	w.history.Wrote(h)
	if h.Outcome != history.Acknowledged { // read the object again
		begin := w.history.Now()
		code, answer, err := w.do(context.Background(), client, "GET", path+"/"+key, "", "")
		read := history.Read{Key: key, Begin: begin, End: w.history.Now()}
		switch {
		case err == nil && code == 200:
			var o object
			_ = json.Unmarshal(answer, &o)
			known[key] = o.item().Revision
			read.Items = []history.Item{o.item()}
		case err == nil && code == 404:
			delete(known, key)
		default:
			return
		}
		w.reads.Add(1)
		w.history.Saw(read)
	}
}

// read lists objects: consistently, at any revision, with a selector, or in pages.
func (w *workload) read(ctx context.Context, r *rand.Rand) {
	client := w.client()
	for ctx.Err() == nil {
		h := history.Read{}
		q := url.Values{}
		if r.IntN(3) == 0 {
			h.Shard = shards[r.IntN(len(shards))]
			q.Set("labelSelector", "shard="+h.Shard)
		}
		switch r.IntN(4) {
		case 0:
			h.Any = true
			q.Set("resourceVersion", "0")
		case 1:
			q.Set("limit", "5")
		}
		h.Begin = w.history.Now()
		if w.list(client, q, &h) {
			w.reads.Add(1)
			w.history.Saw(h)
		}
		time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
	}
}

// list reads all pages of a list. It returns false if a page expired or failed, because the list then proves nothing.
func (w *workload) list(client *http.Client, q url.Values, h *history.Read) bool {
	first := true
	for {
		code, answer, err := w.do(context.Background(), client, "GET", path+"?"+q.Encode(), "", "")
		var l struct {
			object
			Items []object
		}
		if err != nil || code != 200 || json.Unmarshal(answer, &l) != nil {
			return false
		}
		if first { // the first page determines the list's revision
			h.End = w.history.Now()
			h.Revision, _ = strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64)
			first = false
		} else if rv, _ := strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64); rv != h.Revision {
			w.complain("a page is of revision %d, the first one of %d", rv, h.Revision)
		}
		for _, o := range l.Items {
			h.Items = append(h.Items, o.item())
		}
		if l.Metadata.Continue == "" {
			return true
		}
		q.Set("continue", l.Metadata.Continue)
	}
}
