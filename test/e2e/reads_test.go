package e2e

import (
	"compress/gzip"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// varying matches the values that differ between any two servers.
var varying = []*regexp.Regexp{
	regexp.MustCompile(`"(resourceVersion|uid|creationTimestamp|time)": ?"[^"]*"`),
	regexp.MustCompile(`too old resource version: \d+ \(\d+\)`),
	regexp.MustCompile(`Too large resource version: \d+, current: \d+`),
	regexp.MustCompile(`127\.0\.0\.1:\d+`),
	regexp.MustCompile(`"\d+m?\d*s"`), // ages
}

type answer struct {
	code                     int
	contentType, retry, body string
	// failed: the request has no complete response, and ask has failed the test.
	failed bool
}

// differ reports whether two responses differ. A failed request differs from none.
func differ(a, b answer) bool { return !a.failed && !b.failed && a != b }

func ask(t *testing.T, s *harness.Server, method, path, accept string) answer {
	t.Helper()
	config := s.Config()
	if method == http.MethodDelete { // the tests compare the Retry-After of reads
		config.Wrap(harness.Retrying)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Error(err)
		return answer{failed: true}
	}
	client.Timeout = time.Minute
	req, err := http.NewRequestWithContext(t.Context(), method, fmt.Sprintf("https://127.0.0.1:%d%s",
		s.Port, path), nil)
	if err != nil {
		t.Error(err)
		return answer{failed: true}
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, b, err := fetch(client, req)
	if err != nil {
		t.Error(err)
		return answer{failed: true}
	}
	body := string(b)
	for _, v := range varying {
		body = v.ReplaceAllString(body, "…")
	}
	return answer{
		code:        resp.StatusCode,
		contentType: resp.Header.Get("Content-Type"),
		retry:       resp.Header.Get("Retry-After"),
		body:        body,
	}
}

// both asks two servers concurrently.
func both(servers [2]*harness.Server, ask func(i int, s *harness.Server) answer) (got [2]answer) {
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() { got[i] = ask(i, s) })
	}
	wg.Wait()
	return got
}

// compareRound fails the test if compare returns an error. A watch with timeoutSeconds is complete only if the machine
// sends its events in time, so compareRound repeats the comparison of such a watch.
func compareRound(t *testing.T, path string, compare func() error) {
	t.Helper()
	if strings.Contains(path, "timeoutSeconds=") {
		harness.Eventually(t, harness.Soon, compare)
	} else if err := compare(); err != nil {
		t.Error(err)
	}
}

// fetch sends a request and reads the body of the response. An error has the request, the elapsed time, the time of
// the headers and the number of bytes read. So a log shows whether the server sent nothing, or did not end the body.
func fetch(client *http.Client, req *http.Request) (*http.Response, []byte, error) {
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return nil, nil, fmt.Errorf("no headers after %v: %w", time.Since(began), err)
	}
	defer resp.Body.Close()
	headers := time.Since(began)
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil, fmt.Errorf("%s %s: %s after %v, %d bytes of the body after %v: %w", req.Method, req.URL,
			resp.Status, headers, len(body), time.Since(began), err)
	}
	return resp, body, nil
}

// compressed requests a list with gzip, and returns its headers, its decompressed body and the list without gzip. It
// retries until the plain list is the same before and after, because lists contain etcd's revision and Tables contain
// ages.
func compressed(t *testing.T, s *harness.Server, protocol, path, accept string) (head, body, plain string) {
	t.Helper()
	config := rest.CopyConfig(s.Config())
	config.NextProtos = []string{protocol}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	client.Timeout = time.Minute
	get := func(encoding string) (http.Header, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			fmt.Sprintf("https://127.0.0.1:%d%s", s.Port, path), nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		req.Header.Set("Accept-Encoding", encoding) // an explicit header stops the client from decompressing
		resp, data, err := fetch(client, req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusOK || (protocol == "h2") != (resp.ProtoMajor == 2) {
			t.Fatal(path, resp.Proto, resp.StatusCode)
		}
		return resp.Header, string(data)
	}
	for range 50 {
		_, before := get("identity")
		h, data := get("gzip")
		r, err := gzip.NewReader(strings.NewReader(data))
		if err != nil {
			t.Fatalf("%s as %s: %v", path, accept, err)
		}
		whole, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("%s as %s: %v", path, accept, err)
		}
		if _, after := get("identity"); after == before {
			head := fmt.Sprint(h["Content-Type"], h["Content-Encoding"], h["Vary"], h["Content-Length"])
			return head, string(whole), before
		}
	}
	t.Fatalf("%s as %s does not stay the same for three requests", path, accept)
	return "", "", ""
}

// TestCompressedListsAreTheLists checks that a compressed list equals the plain list, in every encoding, after every
// kind of change.
func TestCompressedListsAreTheLists(t *testing.T) {
	t.Parallel()
	ours, theirs := harness.Up(t, ""), harness.Oracle(t)
	const ns, objects = "compressed", 300
	clients := map[*harness.Server]kubernetes.Interface{}
	for _, s := range []*harness.Server{ours, theirs} {
		s.Kubectl("create", "namespace", ns)
		c, err := kubernetes.NewForConfig(s.Config())
		if err != nil {
			t.Fatal(err)
		}
		clients[s] = c
		for i := range objects {
			object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c%03d", i)}}
			object.Labels = map[string]string{"half": strconv.Itoa(i % 2), "filler": strings.Repeat("x", 60)}
			object.Annotations = map[string]string{"filler": strings.Repeat("annotation", 60)}
			object.Data = map[string]string{"k": strings.Repeat(strconv.Itoa(i), 700)}
			harness.Write(t, func() error {
				_, err := c.CoreV1().ConfigMaps(ns).Create(t.Context(), object, metav1.CreateOptions{})
				return err
			})
		}
	}
	const path = "/api/v1/namespaces/" + ns + "/configmaps"
	same := func(when string) {
		t.Helper()
		for _, protocol := range []string{"h2", "http/1.1"} {
			for _, query := range []string{"", "?resourceVersion=0", "?limit=250", "?labelSelector=half%3D1"} {
				for _, accept := range []string{
					"application/json",
					"application/vnd.kubernetes.protobuf",
					"application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
					"application/json;as=Table;v=v1;g=meta.k8s.io",
				} {
					head, body, plain := compressed(t, ours, protocol, path+query, accept)
					if body != plain {
						t.Errorf("%s, %s%s as %s: %d bytes are not the %d of the list", when, protocol, query, accept,
							len(body), len(plain))
					}
					if want, _, _ := compressed(t, theirs, protocol, path+query, accept); head != want {
						t.Errorf("%s, %s%s as %s: %s; kube-apiserver: %s", when, protocol, query, accept, head, want)
					}
				}
			}
		}
	}
	same("at first")
	for _, s := range []*harness.Server{ours, theirs} {
		maps := clients[s].CoreV1().ConfigMaps(ns)
		if _, err := maps.Patch(t.Context(), "c100", types.MergePatchType, []byte(`{"data":{"k":"changed"}}`),
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"c000", "c200", "c299"} {
			if err := maps.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	same("after changes")
}

func token(json string) string { return base64.RawURLEncoding.EncodeToString([]byte(json)) }

// TestListsAndWatchesAreAnsweredAsByKubeAPIServer checks unusual lists and watches against kube-apiserver's responses.
func TestListsAndWatchesAreAnsweredAsByKubeAPIServer(t *testing.T) {
	t.Parallel()
	ours, theirs := harness.Up(t, ""), harness.Oracle(t)
	for _, s := range []*harness.Server{ours, theirs} {
		s.Kubectl("create", "namespace", "odd")
		for _, name := range []string{"a-b", "a.b", "a1", "cm1", "cm2"} {
			s.Kubectl("create", "configmap", name, "-n", "odd", "--from-literal=k=v")
		}
	}
	var current []string
	for _, s := range []*harness.Server{ours, theirs} {
		current = append(current, s.Kubectl("get", "cm", "cm2", "-n", "odd", "-o",
			"jsonpath={.metadata.resourceVersion}"))
	}
	var wg sync.WaitGroup
	const cms = "/api/v1/namespaces/odd/configmaps"
	const future = "999999999"
	data := "fieldSelector=metadata.name%3Dcm1"
	for _, c := range []struct{ method, path, accept string }{
		{"GET", cms + "?labelSelector=a%3D%3D%3Db", ""},
		{"GET", cms + "?watch=1&labelSelector=a%3D%3D%3Db", ""},
		{"GET", cms + "?fieldSelector=a", ""},
		{"GET", cms + "?fieldSelector=data.x%3Dy", ""},
		{"GET", cms + "?watch=1&fieldSelector=data.x%3Dy", ""},
		{"GET", cms + "?resourceVersion=abc", ""},
		{"GET", cms + "?resourceVersion=-1", ""},
		{"GET", cms + "?watch=1&resourceVersion=abc", ""},
		{"GET", cms + "?watch=1&resourceVersion=-1", ""},
		{"GET", cms + "?resourceVersion=" + future, ""},
		{"GET", cms + "?limit=2&resourceVersion=" + future, ""},
		{"GET", cms + "?resourceVersionMatch=Exact&resourceVersion=" + future, ""},
		{"GET", cms + "/cm1?resourceVersion=" + future, ""},
		{"GET", cms + "?resourceVersionMatch=Exact", ""},
		{"GET", cms + "?resourceVersionMatch=Exact&resourceVersion=0", ""},
		{"GET", cms + "?resourceVersionMatch=Sideways&resourceVersion=5", ""},
		{"GET", cms + "?watch=1&resourceVersionMatch=NotOlderThan&resourceVersion=5", ""},
		{"GET", cms + "?sendInitialEvents=true", ""},
		{"GET", cms + "?watch=1&sendInitialEvents=true", ""},
		{"GET", cms + "?watch=1&sendInitialEvents=true&resourceVersionMatch=Exact", ""},
		{"GET", cms + "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan" +
			"&allowWatchBookmarks=true&timeoutSeconds=1", ""}, // before the first periodic bookmark
		{"GET", cms + "?watch=1&timeoutSeconds=5", ""},
		{"GET", cms + "?watch=1&timeoutSeconds=5&" + data, ""},
		{"GET", cms + "?shardSelector=ignored+without+its+gate", ""},
		{"GET", cms + "?watch=1&timeoutSeconds=5&shardSelector=ignored+without+its+gate", ""},
		{"GET", cms + "?limit=-1", ""},
		{"GET", cms + "?limit=abc", ""},
		{"GET", cms + "?limit=1&" + data, ""},
		{"GET", cms + "?limit=2&resourceVersion=0", ""},
		{"GET", cms + "?limit=2&continue=rubbish", ""},
		{"GET", cms + "?limit=2&continue=" + token("rubbish"), ""},
		{"GET", cms + "?limit=2&continue=" + token(`{"v":"v0","rv":5,"start":"cm1"}`), ""},
		{"GET", cms + "?limit=2&continue=" + token(`{"v":"meta.k8s.io/v1","rv":5,"start":"../x"}`), ""},
		{"GET", cms + "?limit=2&continue=" + token(`{"v":"meta.k8s.io/v1","rv":5,"start":"a//b"}`), ""},
		{"GET", cms + "?limit=2&continue=" + token(`{"v":"meta.k8s.io/v1","rv":5,"start":""}`), ""},
		{"GET", cms + "?limit=2&resourceVersion=CURRENT&continue=" +
			token(`{"v":"meta.k8s.io/v1","rv":CURRENT,"start":"cm1"}`), ""},
		{"GET", cms + "?limit=9&continue=" + token(`{"v":"meta.k8s.io/v1","rv":CURRENT,"start":"a-b\u0000"}`), ""},
		{"GET", cms + "?limit=9&continue=" + token(`{"v":"meta.k8s.io/v1","rv":CURRENT,"start":"/a-b\u0000"}`), ""},
		{"GET", cms, "application/*"},
		{"GET", cms, "application/xml"},
		{"GET", cms + "?watch=1", "application/yaml"},
		{"GET", cms + "?watch=1&includeObject=bad", "application/json;as=Table;v=v1;g=meta.k8s.io"},
		{"GET", cms + "?includeObject=bad", "application/json;as=Table;v=v1;g=meta.k8s.io"},
		{"GET", cms, "application/json;as=Table;v=v1;g=meta.k8s.io"},
		{"GET", "/api/v1/watch/namespaces/odd/configmaps/cm1?timeoutSeconds=5", ""},
		{"GET", "/api/v1/watch/namespaces/odd?timeoutSeconds=5", ""},
		{"GET", "/api/v1/namespaces?watch=1&timeoutSeconds=5&fieldSelector=metadata.name%3Dodd", ""},
		{"POST", "/api/v1/watch/namespaces/odd/configmaps", ""},
		{"DELETE", "/api/v1/watch/namespaces/odd/configmaps", ""},
		{"HEAD", cms, ""},
		{"HEAD", "/version", ""},
		{"GET", "/api/v1/pods?watch=1&timeoutSeconds=5&fieldSelector=status.podIPs%3D1.2.3.4", ""},
		{"GET", "/api/v1/bindings", ""},
		{"GET", "/api/v1/namespaces/odd/bindings/x", ""},
		{"GET", "/api/v1/watch/bindings", ""},
		{"GET", "/api/v1/componentstatuses?watch=1", ""},
	} {
		wg.Go(func() {
			compareRound(t, c.path, func() error {
				got := both([2]*harness.Server{ours, theirs}, func(i int, s *harness.Server) answer {
					path := c.path
					if head, tok, ok := strings.Cut(path, "continue="); ok && strings.Contains(decode(tok), "CURRENT") {
						path = head + "continue=" + token(strings.ReplaceAll(decode(tok), "CURRENT", current[i]))
					}
					return ask(t, s, c.method, strings.ReplaceAll(path, "CURRENT", current[i]), c.accept)
				})
				if differ(got[0], got[1]) {
					return fmt.Errorf("%s %s (%s)\nkube-apiserver: %+v\nwatershed:      %+v",
						c.method, c.path, c.accept, got[1], got[0])
				}
				return nil
			})
		})
	}
	wg.Wait()
}

func decode(token string) string {
	b, _ := base64.RawURLEncoding.DecodeString(token)
	return string(b)
}

// TestMetadataOfDaemonSets checks that metadata of a DaemonSet lacks the annotation that the DaemonSet itself has, as
// in kube-apiserver: in reads, lists, Tables and watches.
func TestMetadataOfDaemonSets(t *testing.T) {
	t.Parallel()
	ours, theirs := harness.Up(t, ""), harness.Oracle(t)
	const sets, annotation = "/apis/apps/v1/namespaces/default/daemonsets", "deprecated.daemonset.template.generation"
	var created [2]string
	for i, s := range []*harness.Server{ours, theirs} {
		created[i] = strings.TrimSpace(s.Kubectl("get", "namespace", "default", "-o",
			"jsonpath={.metadata.resourceVersion}"))
		s.Apply(`{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d, namespace: default}, spec: {
selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`)
		s.Kubectl("label", "daemonset", "d", "-n", "default", "x=y")
	}
	const protobuf = "application/vnd.kubernetes.protobuf"
	var wg sync.WaitGroup
	for _, c := range []struct {
		path, as string
		has      bool
	}{
		{sets, "", true},
		{sets + "/d", ";as=PartialObjectMetadata;v=v1;g=meta.k8s.io", false},
		{sets, ";as=PartialObjectMetadataList;v=v1;g=meta.k8s.io", false},
		{sets + "?watch=1&timeoutSeconds=5", ";as=PartialObjectMetadata;v=v1;g=meta.k8s.io", false},
		{sets + "?watch=1&timeoutSeconds=5&resourceVersion=CREATED", ";as=PartialObjectMetadata;v=v1;g=meta.k8s.io", false},
		{sets, ";as=Table;v=v1;g=meta.k8s.io", false},
		{sets + "?watch=1&timeoutSeconds=5", ";as=Table;v=v1;g=meta.k8s.io", false},
		{sets + "?watch=1&timeoutSeconds=5&resourceVersion=CREATED", ";as=Table;v=v1;g=meta.k8s.io", false},
	} {
		for _, media := range []string{"application/json", protobuf} {
			compare := func() error {
				got := both([2]*harness.Server{ours, theirs}, func(i int, s *harness.Server) answer {
					return ask(t, s, "GET", strings.ReplaceAll(c.path, "CREATED", created[i]), media+c.as)
				})
				for i := range got {
					// managedFields have the key too, without a value
					has := strings.Contains(got[i].body, annotation+`":"`) ||
						strings.Contains(got[i].body, annotation+"\x12")
					if !got[i].failed && got[i].code != http.StatusNotAcceptable && has != c.has {
						t.Errorf("%s as %s of server %d: %+v", c.path, media+c.as, i, got[i])
					}
					if media == protobuf && got[i].code == http.StatusOK {
						got[i].body = "" // it has revisions
					}
				}
				if differ(got[0], got[1]) {
					return fmt.Errorf("%s as %s\nkube-apiserver: %+v\nwatershed:      %+v", c.path, media+c.as,
						got[1], got[0])
				}
				return nil
			}
			wg.Go(func() { compareRound(t, c.path, compare) })
		}
	}
	wg.Wait()
}

// TestAnOldWatchIsReplayedFromTheLog checks that a watch resumes from a revision older than every replica's ring, as
// long as the log holds it.
func TestAnOldWatchIsReplayedFromTheLog(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--watch-ring-bytes=20000", "--watch-broadcast-bytes=2000")
	maps := s.Client().CoreV1().ConfigMaps("default")
	const number = 300
	for n := range number {
		harness.Write(t, func() error {
			_, err := maps.Create(t.Context(), &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m", n)},
				Data:       map[string]string{"pad": strings.Repeat("x", 500)},
			}, metav1.CreateOptions{})
			return err
		})
	}
	first, err := maps.Get(t.Context(), "m0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: first.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	read := func(want string) {
		t.Helper()
		select {
		case e, ok := <-w.ResultChan():
			if m, is := e.Object.(*corev1.ConfigMap); !ok || !is || m.Name != want {
				t.Fatalf("%v %v, not %s", e.Type, e.Object, want)
			}
		case <-time.After(harness.Soon):
			t.Fatalf("%s does not come", want)
		}
	}
	for n := 1; n < number; n++ {
		read(fmt.Sprint("m", n))
	}
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "live"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	read("live")
}
