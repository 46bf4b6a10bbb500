package main

import (
	"bytes"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
	"sigs.k8s.io/yaml"

	"watershed.dev/test/harness"
)

// corpusOfPlugins are requests that each admission plugin accepts, changes or rejects, with kube-apiserver's responses.
//
//go:embed plugins.yaml
var corpusOfPlugins []byte

// pluginSet is an admission configuration and its requests.
type pluginSet struct {
	Name  string   `json:"name"`
	Flags []string `json:"flags"`
	// Config is the content of --admission-control-config-file. It refers to Files.
	Config string            `json:"config"`
	Files  map[string]string `json:"files"`
	// Bootstrap means that kube-apiserver does not start with these flags on an unused etcd.
	Bootstrap bool         `json:"bootstrap"`
	Steps     []pluginStep `json:"steps"`
}

type pluginStep struct {
	// Plugin is the plugin under test. It is empty in steps that only prepare.
	Plugin string          `json:"plugin"`
	About  string          `json:"about"`
	As     string          `json:"as"`
	Groups []string        `json:"groups"`
	Method string          `json:"method"`
	Path   string          `json:"path"`
	Type   string          `json:"type"`
	Body   json.RawMessage `json:"body"`
	// Code and Shows describe kube-apiserver's response: its status, and a part of its body or warnings.
	Code  int    `json:"code"`
	Shows string `json:"shows"`
	// Until repeats the request until the response matches, because informers lag.
	Until bool `json:"until"`
}

// plugins compares the requests that every plugin accepts and rejects.
func (x *axes) plugins() {
	var corpus struct {
		Sets []pluginSet `json:"sets"`
	}
	if err := yaml.UnmarshalStrict(corpusOfPlugins, &corpus); err != nil {
		x.t.Fatal(err)
	}
	missing := slices.Clone(kubeoptions.AllOrderedPlugins)
	for _, set := range corpus.Sets {
		for _, s := range set.Steps {
			missing = slices.DeleteFunc(missing, func(p string) bool { return p == s.Plugin })
		}
		start := harness.Twins
		if set.Bootstrap {
			start = harness.UsedTwins
		}
		x.configuration("admission "+set.Name, start, func(a *axis, dir string, w *web) []string {
			w.reviews()
			return append(set.flags(a, dir, w), a.auditFlags(dir, everything)...)
		}, func(a *axis, p *pair, w *web, dir string) {
			for _, step := range set.Steps {
				a.step(p, step, func(text string) string { return placed(text, dir, w) })
			}
			a.compareAudits(p, func(s *side) []fields { return a.recordsOf(auditLog(dir, s.name)) })
		})
	}
	if len(missing) > 0 {
		x.t.Errorf("no step shows %v", missing)
	}
}

// placed replaces the placeholders of the test's web server and directory.
func placed(text, dir string, w *web) string {
	return strings.NewReplacer("{{dir}}", dir, "{{webhook}}", w.base, "{{webhookca}}",
		filepath.Join(dir, "webhook-ca.crt"), "{{webhookcabundle}}", base64.StdEncoding.EncodeToString(w.ca.pem())).
		Replace(text)
}

func (s *pluginSet) flags(a *axis, dir string, w *web) (flags []string) {
	w.ca.file(filepath.Join(dir, "webhook-ca.crt"))
	for name, text := range s.Files {
		write(a.t, filepath.Join(dir, name), placed(text, dir, w))
	}
	for _, f := range s.Flags {
		flags = append(flags, placed(f, dir, w))
	}
	if s.Config != "" {
		path := filepath.Join(dir, "admission.yaml")
		write(a.t, path, placed(s.Config, dir, w))
		flags = append(flags, "--admission-control-config-file="+path)
	}
	return flags
}

// step sends a step to both servers, and checks kube-apiserver's response against the corpus.
func (a *axis) step(p *pair, step pluginStep, place func(string) string) {
	r := &request{
		method: step.Method, path: step.Path, about: step.Plugin + ": " + step.About,
		header: map[string]string{"Content-Type": "application/json"},
	}
	if step.Type != "" {
		r.header["Content-Type"] = step.Type
	}
	if len(step.Body) > 0 {
		r.body = []byte(place(string(step.Body)))
	}
	if step.As != "" {
		r.more = func(*side) http.Header {
			return http.Header{"Impersonate-User": {step.As}, "Impersonate-Group": step.Groups}
		}
	}
	r = p.withAuditID(r)
	r.repeated = step.Until
	until := func(s *side) (got answer) {
		for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
			got = s.do(a.t.Context(), r)
			if !step.Until || step.shown(got) || time.Since(began) > harness.Soon {
				return got
			}
		}
	}
	var theirs, ours answer
	var wg sync.WaitGroup
	wg.Go(func() { theirs = until(p.theirs) })
	wg.Go(func() { ours = until(p.ours) })
	wg.Wait()
	p.repeats(r, theirs, ours)
	if !r.lost && !step.shown(theirs) {
		a.t.Errorf(
			"%s: kube-apiserver said %d, not %d, or does not show %q: %s",
			r.about,
			theirs.code,
			step.Code,
			step.Shows,
			theirs.body,
		)
	}
	p.report.compare(r, theirs, ours)
}

// shown returns true if a response matches the step.
func (s *pluginStep) shown(a answer) bool {
	if a.err != nil || a.code != s.Code {
		return false
	}
	var compact bytes.Buffer
	_ = json.Compact(&compact, a.body)
	return strings.Contains(unescaped.Replace(compact.String()), s.Shows) ||
		strings.Contains(string(a.body), s.Shows) ||
		strings.Contains(fmt.Sprint(a.header.Values("Warning")), s.Shows)
}

// unescaped reverts the HTML escapes of Go's JSON encoder.
var unescaped = strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&")

// reviews makes the server an admission webhook: image policies, and reviews that deny or change objects.
func (w *web) reviews() {
	answer := func(rw http.ResponseWriter, of fields, key string, v fields) {
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(fields{"apiVersion": of["apiVersion"], "kind": of["kind"], key: v})
	}
	decode := func(req *http.Request) (of, part fields) {
		_ = json.NewDecoder(req.Body).Decode(&of)
		for _, key := range []string{"request", "spec"} {
			if v, ok := of[key].(fields); ok {
				return of, v
			}
		}
		return of, fields{}
	}
	w.HandleFunc("/image", func(rw http.ResponseWriter, req *http.Request) {
		of, spec := decode(req)
		status := fields{"allowed": true}
		containers, _ := spec["containers"].([]any)
		for _, c := range containers {
			if image, _ := c.(fields)["image"].(string); strings.Contains(image, "bad") && status["reason"] == nil {
				status = fields{"allowed": false, "reason": "image " + image + " is bad"}
			}
		}
		answer(rw, of, "status", status)
	})
	w.HandleFunc("/deny", func(rw http.ResponseWriter, req *http.Request) {
		of, review := decode(req)
		answer(rw, of, "response", fields{
			"uid": review["uid"], "allowed": false, "warnings": []string{"a warning of the webhook"},
			"status": fields{"message": "denied by /deny; authorization: " + req.Header.Get("Authorization")},
		})
	})
	w.HandleFunc("/slow", func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body) // after this read the server detects the client's disconnect
		<-req.Context().Done()
	})
	w.HandleFunc("/broken", func(rw http.ResponseWriter, _ *http.Request) {
		http.Error(rw, "broken", http.StatusInternalServerError)
	})
	w.HandleFunc("/garbage", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write([]byte("{")) })
	w.HandleFunc("/badpatch", func(rw http.ResponseWriter, req *http.Request) {
		of, review := decode(req)
		patch := []byte(`[{"op":"remove","path":"/metadata/labels/none"}]`)
		answer(rw, of, "response",
			fields{"uid": review["uid"], "allowed": true, "patchType": "JSONPatch", "patch": patch})
	})
	w.HandleFunc("/label", func(rw http.ResponseWriter, req *http.Request) {
		of, review := decode(req)
		patch := []byte(`[{"op":"add","path":"/metadata/labels","value":{"webhook":"yes"}}]`)
		answer(
			rw,
			of,
			"response",
			fields{"uid": review["uid"], "allowed": true, "patchType": "JSONPatch", "patch": patch},
		)
	})
}
