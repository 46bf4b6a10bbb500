package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"watershed.dev/test/harness"
)

// walker sends random requests for a few names of a few types, so that requests affect each other's objects.
type walker struct {
	*pair
	rng   *rand.Rand
	kinds []*object
	names []string
}

// walk sends n requests while several kinds of watches run, and then compares the events of the watches.
func (p *pair) walk(all []*object, n int, rng *rand.Rand) {
	w := &walker{pair: p, rng: rng, names: []string{"w1", "w2", "w3", "w4"}}
	for _, o := range all {
		switch o.kind.Kind {
		case "ConfigMap",
			"Secret",
			"Service",
			"Deployment",
			"Pod",
			"Role",
			"PersistentVolumeClaim",
			"ServiceAccount",
			"Widget",
			"Global",
			"PriorityClass",
			"Lease",
			"CronJob":
			w.kinds = append(w.kinds, o)
		}
	}
	p.allowWalkers()
	var watches []*watching
	for _, o := range w.kinds {
		for _, query := range []string{"", "&labelSelector=app%3Da", "&fieldSelector=metadata.name%3Dw1"} {
			for _, accept := range []string{"application/json",
				"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
				"application/json;as=Table;g=meta.k8s.io;v=v1"} {
				if query != "" && accept != "application/json" {
					continue
				}
				watches = append(watches, p.watch(o.collection+"?watch=1"+query, accept))
			}
		}
	}
	for range n {
		w.step()
	}
	// The last objects mark the end for each watch.
	created := map[string]bool{}
	for _, o := range w.kinds {
		last := clone(o.body)
		last["metadata"] = map[string]any{"name": "w1", "labels": map[string]any{"app": "a", "last": "yes"}}
		p.ask(&request{method: "DELETE", path: o.collection + "/w1?gracePeriodSeconds=0", about: "the end"})
		for _, name := range w.names { // a finalizer would keep the object, and its CRD in the phase remove
			p.ask(&request{
				method: "PATCH",
				path:   o.collection + "/" + name,
				header: map[string]string{"Content-Type": "application/merge-patch+json"},
				body:   []byte(`{"metadata":{"finalizers":null}}`),
				about:  "the end",
			})
		}
		created[o.collection] = p.ask(&request{
			method: "POST",
			path:   o.collection,
			header: jsonBody,
			body:   must(json.Marshal(last)),
			about:  "the end",
		}).code == http.StatusCreated
	}
	for deadline := time.Now().Add(harness.Soon); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if !slices.ContainsFunc(watches, func(w *watching) bool {
			collection, _, _ := strings.Cut(w.path, "?")
			return created[collection] && w.behind.Load() > 0
		}) {
			break
		}
	}
	time.Sleep(time.Second) // an extra event is a difference too
	for _, watch := range watches {
		watch.compare(p)
	}
}

// walkers are users with different rights: all verbs on some resources, read everything, all verbs on one name, none.
var walkers = []string{"editor", "reader", "namer", "system:serviceaccount:default:default", "nobody"}

// allowWalkers creates the walkers' rights on both sides, and waits until they are in force.
func (p *pair) allowWalkers() {
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	post := func(path, body string, args ...any) {
		p.ask(&request{
			method: "POST", path: rbac + path, header: jsonBody, body: fmt.Appendf(nil, body, args...),
			about: "walkers",
		})
	}
	for _, r := range []struct{ user, rule string }{
		{"editor",
			`{"apiGroups":["","apps"],"resources":["configmaps","pods","deployments","services"],"verbs":["*"]},` +
				`{"apiGroups":["rbac.authorization.k8s.io"],"resources":["roles"],"verbs":["*"]}`},
		{"reader", `{"apiGroups":["*"],"resources":["*"],"verbs":["get","list","watch"]}`},
		{"namer", `{"apiGroups":["*"],"resources":["*"],"resourceNames":["w1"],"verbs":["*"]}`},
		{"last", `{"apiGroups":[""],"resources":["pods"],"verbs":["get"]}`},
	} {
		post("clusterroles",
			`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","metadata":{"name":"walk-%s"},`+
				`"rules":[%s]}`,
			r.user, r.rule)
		post("clusterrolebindings",
			`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRoleBinding",`+
				`"metadata":{"name":"walk-%[1]s"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io",`+
				`"kind":"ClusterRole","name":"walk-%[1]s"},"subjects":[{"apiGroup":"rbac.authorization.k8s.io",`+
				`"kind":"User","name":%[1]q}]}`,
			r.user)
	}
	last := &request{method: "GET", path: "/api/v1/namespaces/default/pods/none",
		header: map[string]string{"Impersonate-User": "last"}}
	for _, s := range []*side{p.theirs, p.ours} {
		harness.Eventually(p.t, harness.Soon, func() error {
			if got := s.do(p.t.Context(), last); got.code != http.StatusNotFound {
				return fmt.Errorf("%s: %d %s", s.name, got.code, got.body)
			}
			return nil
		})
	}
}

func (w *walker) pick(all ...string) string { return all[w.rng.IntN(len(all))] }

func (w *walker) step() {
	o := w.kinds[w.rng.IntN(len(w.kinds))]
	name := w.names[w.rng.IntN(len(w.names))]
	path := o.collection + "/" + name
	body := clone(o.body)
	body["metadata"] = map[string]any{
		"name":   name,
		"labels": map[string]any{"app": w.pick("a", "b"), "n": fmt.Sprint(w.rng.IntN(5))},
	}
	m := body["metadata"].(map[string]any)
	options := func(more ...string) string {
		var q []string
		if w.rng.IntN(8) == 0 {
			q = append(q, "dryRun=All")
		}
		if w.rng.IntN(6) == 0 {
			q = append(q, "fieldManager="+w.pick("one", "two"))
		}
		q = append(q, more...)
		if len(q) == 0 {
			return ""
		}
		return "?" + strings.Join(q, "&")
	}
	send := func(method, path, contentType string, body any, about string) {
		r := &request{method: method, path: path, about: about, header: map[string]string{}}
		if body != nil {
			r.header["Content-Type"] = contentType
			if text, ok := body.(string); ok {
				r.body = []byte(text)
			} else {
				r.body = must(json.Marshal(body))
			}
		}
		if w.rng.IntN(4) == 0 { // a user other than the administrator
			r.header["Impersonate-User"] = walkers[w.rng.IntN(len(walkers))]
			r.about += " as " + r.header["Impersonate-User"]
		}
		if w.rng.IntN(10) == 0 {
			r.header["Accept"] = accepts[w.rng.IntN(len(accepts))]
		}
		w.ask(r)
	}
	const merge, strategic, apply, jsonPatch = "application/merge-patch+json", "application/strategic-merge-patch+json",
		"application/apply-patch+yaml", "application/json-patch+json"
	switch w.rng.IntN(20) {
	case 0, 1, 2, 3:
		if w.rng.IntN(6) == 0 {
			mutation := mutate(body, w.rng)
			send("POST", o.collection+options(), "application/json", body, "create mutated: "+mutation)
			return
		}
		if w.rng.IntN(5) == 0 {
			m["finalizers"] = []any{"example.com/hold"}
		}
		send("POST", o.collection+options(), "application/json", body, "create")
	case 4, 5:
		m["resourceVersion"] = versionOf(path)
		m["annotations"] = map[string]any{"step": fmt.Sprint(w.rng.IntN(3))}
		send("PUT", path+options(), "application/json", body, "update")
	case 6:
		send("PUT", path+options(), "application/json", body, "update without version")
	case 7, 8:
		send("PATCH", path+options(), merge,
			fmt.Sprintf(`{"metadata":{"labels":{"app":%q,"n":null}}}`, w.pick("a", "b", "c")), "merge patch")
	case 9:
		send("PATCH", path+options(), strategic, fmt.Sprintf(`{"metadata":{"annotations":{"s":%q}}}`, w.pick("1", "2")),
			"strategic patch")
	case 10:
		send("PATCH", path+options(), jsonPatch,
			fmt.Sprintf(`[{"op":%q,"path":"/metadata/labels/%s","value":"x"}]`,
				w.pick("add", "replace", "remove", "test"), w.pick("app", "n", "z")), "json patch")
	case 11, 12:
		force := w.pick("", "&force=true")
		q := "?fieldManager=" + w.pick("one", "two", "three") + force
		if w.rng.IntN(6) == 0 {
			q += "&dryRun=All"
		}
		send("PATCH", path+q, apply, body, "apply")
	case 13:
		send("PATCH", path, merge, `{"metadata":{"finalizers":`+w.pick("null", `["example.com/hold"]`)+`}}`,
			"finalizers")
	case 14, 15:
		options := w.pick("", `{"propagationPolicy":"Background"}`, `{"propagationPolicy":"Foreground"}`,
			`{"propagationPolicy":"Orphan"}`, `{"gracePeriodSeconds":0}`, `{"preconditions":{"uid":"`+uidOf(path)+`"}}`,
			`{"preconditions":{"resourceVersion":"`+versionOf(path)+`"}}`, `{"dryRun":["All"]}`)
		if options == "" {
			send("DELETE", path, "", nil, "delete")
		} else {
			send("DELETE", path, "application/json", options, "delete "+options)
		}
	case 16:
		if w.rng.IntN(3) == 0 {
			send("DELETE", o.collection+"?labelSelector=n%3D"+fmt.Sprint(w.rng.IntN(5)), "", nil, "delete collection")
			return
		}
		fallthrough
	case 17:
		send("GET", path, "", nil, "get") // with resourceVersion=0 either server may be stale
	default:
		q := w.pick("", "?limit=2", "?labelSelector=app%3Da", "?labelSelector=app%20in%20(a,b),n",
			"?fieldSelector=metadata.name%21%3Dw1", "?fieldSelector=metadata.name%3Dw2",
			"?resourceVersion="+versionOf(path)+"&resourceVersionMatch=NotOlderThan",
			"?resourceVersion="+versionOf(path)+"&resourceVersionMatch=Exact")
		send("GET", o.collection+q, "", nil, "list")
	}
}

// watching is one watch on both sides.
type watching struct {
	path, accept string
	cancel       context.CancelFunc
	wg           sync.WaitGroup
	// behind is the number of servers whose watch is open and has not received the last object.
	behind   atomic.Int32
	mu       sync.Mutex
	received map[*side][]any
}

func (p *pair) watch(path, accept string) *watching {
	ctx, cancel := context.WithCancel(p.t.Context())
	w := &watching{path: path, accept: accept, cancel: cancel, received: map[*side][]any{}}
	for _, s := range []*side{p.theirs, p.ours} {
		opened := make(chan struct{})
		w.behind.Add(1)
		last := sync.OnceFunc(func() { w.behind.Add(-1) })
		w.wg.Go(func() {
			defer last()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+path, nil)
			if err != nil {
				close(opened)
				return
			}
			req.Header.Set("Accept", accept)
			streams := &http.Client{Transport: harness.Retrying(s.client.Transport)}
			resp, err := streams.Do(req)
			close(opened)
			if err != nil {
				return
			}
			defer resp.Body.Close()
			lines := bufio.NewScanner(resp.Body)
			lines.Buffer(nil, 16<<20)
			for lines.Scan() {
				w.mu.Lock()
				w.received[s] = append(w.received[s], normal(fromJSON(lines.Bytes())))
				w.mu.Unlock()
				if bytes.Contains(lines.Bytes(), []byte(`"last":"yes"`)) {
					last()
				}
			}
		})
		<-opened
	}
	return w
}

// compare compares the events of both servers. Concurrent events of different objects have etcd's order on both sides,
// because it is the order of the requests.
func (w *watching) compare(p *pair) {
	w.cancel()
	w.wg.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	body := func(s *side) []byte {
		var b strings.Builder
		for _, e := range settle(w.received[s]) {
			b.Write(must(json.Marshal(e)))
			b.WriteByte('\n')
		}
		return []byte(b.String())
	}
	r := &request{
		method: "WATCH",
		path:   w.path,
		header: map[string]string{"Accept": w.accept},
		about:  fmt.Sprintf("%d events", len(w.received[p.theirs])),
	}
	head := http.Header{"Content-Type": {"application/json;stream=watch"}}
	p.report.compare(r, answer{
		code:   200,
		header: head,
		body:   body(p.theirs),
	}, answer{code: 200, header: head, body: body(p.ours)})
}

// settle sorts the initial events by their text without ages, because their order is undefined. Names may be random,
// and ages may differ by a second.
func settle(events []any) []any {
	n := 0
	for n < len(events) {
		m, _ := events[n].(map[string]any)
		if m["type"] != "ADDED" {
			break
		}
		n++
	}
	initial := slices.Clone(events[:n])
	key := func(e any) string { return duration.ReplaceAllString(fmt.Sprint(e), "AGE") }
	slices.SortStableFunc(initial, func(a, b any) int { return strings.Compare(key(a), key(b)) })
	return append(initial, events[n:]...)
}
