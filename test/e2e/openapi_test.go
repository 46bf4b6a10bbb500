package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// openAPIPair compares the OpenAPI pages of kube-apiserver and Watershed.
type openAPIPair struct {
	hosts   [2]string
	clients [2]*http.Client
}

func newOpenAPIPair(t *testing.T, theirs, ours *harness.Server) *openAPIPair {
	t.Helper()
	p := &openAPIPair{}
	for i, s := range []*harness.Server{theirs, ours} {
		config := s.Config()
		config.DisableCompression = true
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		p.hosts[i], p.clients[i] = config.Host, client
	}
	return p
}

// comparedHeaders are compared by value, and presentHeaders by presence.
var (
	comparedHeaders = []string{"Content-Type", "Content-Length", "Content-Encoding", "Etag", "Cache-Control", "Vary",
		"Location", "Accept-Ranges", "Allow", "X-Content-Type-Options"}
	presentHeaders = []string{"Expires", "Last-Modified", "Audit-Id"}
)

// request returns the responses of both servers, and an error if they differ.
func (p *openAPIPair) request(method, path string, headers map[string]string) (bodies [2][]byte, err error) {
	var shown [2][]string
	for i := range p.hosts {
		req, err := http.NewRequest(method, p.hosts[i]+path, nil)
		if err != nil {
			return bodies, err
		}
		for name, value := range headers {
			req.Header.Set(name, value)
		}
		resp, err := p.clients[i].Do(req)
		if err != nil {
			return bodies, err
		}
		bodies[i], err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return bodies, err
		}
		shown[i] = []string{resp.Status}
		for _, name := range comparedHeaders {
			shown[i] = append(shown[i], fmt.Sprint(name, resp.Header[name]))
		}
		for _, name := range presentHeaders {
			shown[i] = append(shown[i], fmt.Sprint(name, len(resp.Header[name])))
		}
	}
	if string(bodies[0]) != string(bodies[1]) {
		return bodies, fmt.Errorf("%s %s %v: bodies differ at %s", method, path, headers, firstDifference(bodies))
	}
	for line := range shown[0] {
		if shown[0][line] != shown[1][line] {
			return bodies, fmt.Errorf("%s %s %v: %s, want %s", method, path, headers, shown[1][line], shown[0][line])
		}
	}
	return bodies, nil
}

// firstDifference returns the surroundings of the first byte that differs.
func firstDifference(bodies [2][]byte) string {
	at := 0
	for at < min(len(bodies[0]), len(bodies[1])) && bodies[0][at] == bodies[1][at] {
		at++
	}
	around := func(b []byte) []byte { return b[max(0, at-100):min(len(b), at+200)] }
	return fmt.Sprintf("byte %d: %q, want %q", at, around(bodies[1]), around(bodies[0]))
}

// choices is how often a GET is repeated until the responses are equal. If two servers have a document of the same
// path, kube-apiserver chooses a server for each request, at random.
const choices = 50

// get returns the bodies of equal responses to a GET.
func (p *openAPIPair) get(path, accept string) (bodies [2][]byte, err error) {
	for range choices {
		if bodies, err = p.request("GET", path, map[string]string{"Accept": accept}); err == nil {
			return bodies, nil
		}
	}
	return bodies, err
}

// compareV2 returns an error if an encoding of the v2 document differs.
func (p *openAPIPair) compareV2() error {
	return p.compareEncodings("/openapi/v2", "v2")
}

// compareV3 returns an error if the index or any v3 document differs. It requests a document also with its hash.
func (p *openAPIPair) compareV3() error {
	index, err := p.get("/openapi/v3", "*/*")
	if err != nil {
		return err
	}
	var paths struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal(index[0], &paths); err != nil {
		return err
	}
	for root, document := range paths.Paths {
		for _, url := range []string{"/openapi/v3/" + root, document.ServerRelativeURL} {
			if err := p.compareEncodings(url, "v3"); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *openAPIPair) compareEncodings(url, version string) error {
	for _, mediaType := range []string{"application/json",
		"application/com.github.proto-openapi.spec." + version + ".v1.0+protobuf",
		"application/com.github.proto-openapi.spec." + version + "@v1.0+protobuf"} {
		if _, err := p.get(url, mediaType); err != nil {
			return err
		}
	}
	return nil
}

// compareRequests returns the errors of requests that do not depend on the content of documents.
func (p *openAPIPair) compareRequests() (errs []error) {
	etag := func(url string) string {
		resp, err := p.clients[0].Get(p.hosts[0] + url)
		if err != nil {
			return err.Error()
		}
		resp.Body.Close()
		return resp.Header.Get("Etag")
	}
	const apps = "/openapi/v3/apis/apps/v1"
	var requests []map[string]string
	for _, accept := range []string{"", "*/*", "application/*", "text/html", "application/yaml", "text/html, */*;q=0.1",
		"application/json;q=0.1, application/com.github.proto-openapi.spec.v3.v1.0+protobuf", "application/json;x=y"} {
		requests = append(requests, map[string]string{"Accept": accept})
	}
	requests = append(requests,
		map[string]string{"Accept-Encoding": "gzip"},
		map[string]string{"Accept-Encoding": "gzip;q=0"},
		map[string]string{"Range": "bytes=0-9"},
		map[string]string{"If-None-Match": `"x"`},
		map[string]string{"If-None-Match": "*"},
		map[string]string{"If-Modified-Since": time.Now().Add(-240 * time.Hour).UTC().Format(http.TimeFormat)})
	for _, url := range []string{"/openapi/v2", "/openapi/v3", apps, apps + "?hash=OLD", apps + "?hash=OLD&x=y",
		"/openapi", "/openapi/", "/openapi/v2/", "/openapi/v2?hash=x", "/openapi/v3/", "/openapi/v4", apps + "/",
		"/openapi/v3/apis/none/v1", "/openapi/v3/apis/apps", "/openapi/v3/API/v1"} {
		for _, method := range []string{"GET", "HEAD", "POST", "DELETE"} {
			if _, err := p.request(method, url, nil); err != nil {
				errs = append(errs, err)
			}
		}
		for _, headers := range append(requests, map[string]string{"If-None-Match": etag(url)}) {
			if _, err := p.request("GET", url, headers); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errs
}

// openAPIDefinitions are CRDs whose schemas have the forms that documents treat in their own ways.
const openAPIDefinitions = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: wells.water.example.com}
spec:
  group: water.example.com
  scope: Namespaced
  names: {kind: Well, plural: wells, singular: well, shortNames: [w], categories: [all]}
  versions:
  - name: v1
    served: true
    storage: true
    selectableFields: [{jsonPath: .spec.owner}]
    subresources: {status: {}, scale: {specReplicasPath: .spec.depth, statusReplicasPath: .status.depth}}
    schema:
      openAPIV3Schema:
        type: object
        description: "A <well> & more"
        properties:
          spec:
            type: object
            required: [depth]
            properties:
              depth: {type: integer, format: int32, minimum: 1, maximum: 3000, default: 7}
              owner: {type: string, pattern: "^[a-z]+$", maxLength: 20}
              port: {x-kubernetes-int-or-string: true}
              any: {type: object, x-kubernetes-preserve-unknown-fields: true}
              pod: {type: object, x-kubernetes-embedded-resource: true, x-kubernetes-preserve-unknown-fields: true}
              maybe: {type: string, nullable: true, enum: [a, b]}
              list:
                type: array
                x-kubernetes-list-type: map
                x-kubernetes-list-map-keys: [name]
                items: {type: object, required: [name], properties: {name: {type: string, default: x}}}
            oneOf: [{required: [owner]}, {required: [port]}]
            x-kubernetes-validations: [{rule: "self.depth < 100", message: deep}]
          status: {type: object, properties: {depth: {type: integer}}}
  - name: v1beta1
    served: true
    storage: false
    deprecated: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
  - name: v1alpha1
    served: false
    storage: false
    schema: {openAPIV3Schema: {type: object}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: rivers.water.example.com}
spec:
  group: water.example.com
  scope: Cluster
  names: {kind: River, plural: rivers}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: string}}}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: lakes.more.example.com}
spec:
  group: more.example.com
  scope: Cluster
  names: {kind: Lake, plural: lakes}
  versions:
  - {name: v2, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`

// deleteCRDs deletes CRDs and waits until they are gone. On a busy machine, kubectl has waited for more than two
// minutes for kube-apiserver, so deleteCRDs polls instead. A change makes upstream's finalizer look at a CRD again.
func deleteCRDs(t *testing.T, s *harness.Server, names ...string) {
	t.Helper()
	s.Kubectl(append([]string{"delete", "crd", "--wait=false"}, names...)...)
	harness.Eventually(t, harness.Soon, func() error {
		left := s.Kubectl(append([]string{"get", "crd", "--ignore-not-found", "-o", "name"}, names...)...)
		for _, crd := range strings.Fields(left) {
			// The CRD may be gone meanwhile.
			_, _ = s.TryKubectl("", "annotate", crd, "e2e.example.com/changed="+time.Now().Format("150405.000"), "--overwrite")
		}
		if left != "" {
			return fmt.Errorf("left: %s", left)
		}
		return nil
	})
}

// refreshed is the timeout of a wait for a document. Both servers refresh a document after a minute.
const refreshed = 3 * time.Minute

// TestOpenAPIEqualsKubeAPIServers compares every OpenAPI document and its headers with kube-apiserver's, byte for byte:
// the built-in documents, and the documents after CRDs and an aggregated server come and go.
func TestOpenAPIEqualsKubeAPIServers(t *testing.T) {
	t.Parallel()
	theirs, ours := harness.Twins(t, "--enable-aggregator-routing")
	p := newOpenAPIPair(t, theirs, ours)
	equal := func(when string) {
		t.Helper()
		t.Log(when)
		harness.Eventually(t, refreshed, p.compareV2)
		harness.Eventually(t, refreshed, p.compareV3)
	}
	both := func(do func(s *harness.Server)) {
		for _, s := range []*harness.Server{theirs, ours} {
			do(s)
		}
	}
	equal("at the start")
	_, first := ours.Get("/openapi/v2")
	for _, err := range p.compareRequests() {
		t.Error(err)
	}
	both(func(s *harness.Server) { s.Apply(openAPIDefinitions) })
	equal("with custom resources")
	both(func(s *harness.Server) {
		s.Kubectl("patch", "crd", "rivers.water.example.com", "--type=json", "-p",
			`[{"op":"add","path":"/spec/versions/0/schema/openAPIV3Schema/description","value":"flows"}]`)
		deleteCRDs(t, s, "lakes.more.example.com")
	})
	equal("after a change")
	both(func(s *harness.Server) {
		dir := harness.TempDir(t)
		port := porttest.FreePort(t)
		harness.Start(t, dir, "sample-apiserver", harness.Peer("sample-apiserver"), "--etcd-servers",
			harness.Etcd(t, dir), "--secure-port", fmt.Sprint(port), "--cert-dir", filepath.Join(dir, "certs"),
			"--kubeconfig", s.Kubeconfig, "--authentication-kubeconfig", s.Kubeconfig, "--authorization-kubeconfig",
			s.Kubeconfig)
		s.Apply(registration(t, port))
	})
	both(func(s *harness.Server) {
		harness.Eventually(t, refreshed, func() error {
			for _, path := range []string{"/openapi/v2", "/openapi/v3"} {
				if _, body := s.Get(path); !strings.Contains(body, "apis/wardle.example.com/v1alpha1") {
					return fmt.Errorf("%s lacks the aggregated server", path)
				}
			}
			return nil
		})
	})
	equal("with an aggregated server")
	both(func(s *harness.Server) {
		s.Kubectl("delete", "apiservice", "v1alpha1.wardle.example.com")
		deleteCRDs(t, s, "rivers.water.example.com", "wells.water.example.com")
	})
	harness.Eventually(t, refreshed, p.compareV3)
	// kube-apiserver keeps kinds of the deleted server in DeleteOptions
	harness.Eventually(t, refreshed, func() error {
		if _, last := ours.Get("/openapi/v2"); last != first {
			return errors.New("the v2 document keeps something of what was deleted")
		}
		return nil
	})
}
