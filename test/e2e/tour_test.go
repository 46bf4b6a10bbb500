package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

	"watershed.dev/test/harness"
)

// tour records the responses of a client as lines.
type tour struct {
	t     *testing.T
	lines []string
}

func (r *tour) step(name string, result any, err error) {
	r.t.Helper()
	data, failed := json.Marshal(map[string]any{"step": name, "result": result, "error": fmt.Sprint(err)})
	if failed != nil {
		r.t.Fatal(failed)
	}
	r.lines = append(r.lines, string(data))
}

// watched records the first event of a watch.
func (r *tour) watched(name string, w watch.Interface, err error) {
	r.t.Helper()
	if err != nil {
		r.step(name, nil, err)
		return
	}
	defer w.Stop()
	select {
	case e := <-w.ResultChan():
		r.step(name, e, nil)
	case <-time.After(harness.Soon):
		r.t.Fatalf("%s: no event", name)
	}
}

var (
	inTour     = metav1.ListOptions{LabelSelector: "tour=go"}
	tourLabels = map[string]string{"tour": "go"}
)

// typed creates, reads, watches, patches and deletes with Go's typed client.
func (r *tour) typed(s *harness.Server) {
	ctx, client := r.t.Context(), s.Client()
	maps := client.CoreV1().ConfigMaps("default")
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "typed", Labels: tourLabels},
		Data:       map[string]string{"a": "1"},
	}
	const name = "typed"
	for range 2 { // the second create fails
		created, err := maps.Create(ctx, object, metav1.CreateOptions{})
		r.step("create", created, err)
	}
	got, err := maps.Get(ctx, name, metav1.GetOptions{})
	r.step("get", got, err)
	list, err := maps.List(ctx, inTour)
	r.step("list", list, err)
	w, err := maps.Watch(ctx, inTour)
	r.watched("watch", w, err)
	patched, err := maps.Patch(ctx, name, types.StrategicMergePatchType, []byte(`{"data":{"b":"2"}}`),
		metav1.PatchOptions{})
	r.step("patch", patched, err)
	r.step("delete", nil, maps.Delete(ctx, name, metav1.DeleteOptions{}))
	got, err = maps.Get(ctx, name, metav1.GetOptions{})
	r.step("get again", got, err)

	deployments := client.AppsV1().Deployments("default")
	replicas := int32(2)
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: tourLabels}}
	deployment.Spec.Replicas = &replicas
	deployment.Spec.Selector = &metav1.LabelSelector{MatchLabels: tourLabels}
	deployment.Spec.Template.Labels = tourLabels
	deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "c", Image: "i"}}
	created, err := deployments.Create(ctx, deployment, metav1.CreateOptions{})
	r.step("create", created, err)
	scale, err := deployments.GetScale(ctx, name, metav1.GetOptions{})
	r.step("scale", scale, err)
	all, err := deployments.List(ctx, inTour)
	r.step("list", all, err)
	w, err = deployments.Watch(ctx, inTour)
	r.watched("watch", w, err)
	for _, patch := range []string{`{"spec":{"replicas":3}}`, `{"spec":{"replicas":-1}}`} {
		changed, err := deployments.Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		r.step("patch", changed, err)
	}
	r.step("delete", nil, deployments.DeleteCollection(ctx, metav1.DeleteOptions{}, inTour))
}

// dynamic does the same with Go's dynamic client, also with a custom resource.
func (r *tour) dynamic(s *harness.Server) {
	ctx := r.t.Context()
	client, err := dynamic.NewForConfig(s.Config())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, x := range []struct {
		resource schema.GroupVersionResource
		object   string
		patch    string
	}{
		{schema.GroupVersionResource{Version: "v1", Resource: "configmaps"},
			`{"apiVersion":"v1","kind":"ConfigMap","data":{"a":"1"}}`, `{"data":{"b":"2"}}`},
		{schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"},
			`{"apiVersion":"apps/v1","kind":"Deployment","spec":{"selector":{"matchLabels":{"tour":"go"}},"template":` +
				`{"metadata":{"labels":{"tour":"go"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`,
			`{"spec":{"replicas":0}}`},
		{schema.GroupVersionResource{Group: "water.example.com", Version: "v1", Resource: "wells"},
			`{"apiVersion":"water.example.com/v1","kind":"Well","spec":{"owner":"me"}}`, `{"spec":{"owner":"NO"}}`},
	} {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON([]byte(x.object)); err != nil {
			r.t.Fatal(err)
		}
		object.SetName("dynamic")
		object.SetLabels(tourLabels)
		objects := client.Resource(x.resource).Namespace("default")
		for range 2 {
			created, err := objects.Create(ctx, object, metav1.CreateOptions{})
			r.step("create", created, err)
		}
		got, err := objects.Get(ctx, "dynamic", metav1.GetOptions{})
		r.step("get", got, err)
		list, err := objects.List(ctx, inTour)
		r.step("list", list, err)
		w, err := objects.Watch(ctx, inTour)
		r.watched("watch", w, err)
		patched, err := objects.Patch(ctx, "dynamic", types.MergePatchType, []byte(x.patch), metav1.PatchOptions{})
		r.step("patch", patched, err)
		applied, err := objects.Apply(ctx, "dynamic", object, metav1.ApplyOptions{FieldManager: "tour", Force: true})
		r.step("apply", applied, err)
		r.step("delete", nil, objects.Delete(ctx, "dynamic", metav1.DeleteOptions{}))
	}
}

// javaScript runs the tour of testdata/javascript. modules is the directory with its packages.
func (r *tour) javaScript(s *harness.Server, modules string) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), "node", filepath.Join(modules, "tour.mjs"), s.Kubeconfig)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		r.t.Fatalf("node: %v\n%s%s", err, out, stderr.String())
	}
	r.lines = strings.Split(strings.TrimSpace(string(out)), "\n")
}

// nodeModules installs the JavaScript client and returns its directory. It skips the test without node, npm or the
// client's package.
func nodeModules(t *testing.T) string {
	t.Helper()
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the tour in JavaScript needs %s: %v", program, err)
		}
	}
	dir := filepath.Join(harness.Root(), ".build", "javascript")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"package.json", "tour.mjs"} {
		data, err := os.ReadFile(filepath.Join("testdata", "javascript", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts",
		"--no-package-lock", "--prefer-offline")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("the tour in JavaScript needs the package of package.json: %v\n%s", err, out)
	}
	return dir
}

// volatile matches the values that differ between any two servers.
var volatile = []*regexp.Regexp{
	regexp.MustCompile(`"(?:uid|resourceVersion|creationTimestamp|time|lastTransitionTime|serverAddress)":"[^"]*"`),
	regexp.MustCompile(`"(?:audit-id|date|x-kubernetes-pf-[a-z-]+|content-length)":"[^"]*"`),
	regexp.MustCompile(`"(?:gitCommit|gitTreeState|gitVersion|buildDate|goVersion|compiler|platform)":"[^"]*"`),
	regexp.MustCompile(`(?:127\.0\.0\.1|192\.0\.2\.1):\d+`), // the servers' own addresses
}

// masked returns a line with sorted keys and without volatile values.
func masked(line string) string {
	var decoded any
	if err := json.Unmarshal([]byte(line), &decoded); err == nil {
		if sorted, err := json.Marshal(decoded); err == nil {
			line = string(sorted)
		}
	}
	for _, v := range volatile {
		line = v.ReplaceAllString(line, "*")
	}
	return line
}

// TestClientsTakeTheSameTour creates, reads, lists, watches, patches and deletes with Go's typed and dynamic clients
// and the JavaScript client, and compares their results with kube-apiserver's.
func TestClientsTakeTheSameTour(t *testing.T) {
	t.Parallel()
	theirs, ours := harness.Twins(t)
	servers := []*harness.Server{theirs, ours}
	for _, s := range servers {
		s.Apply(openAPIDefinitions)
		s.Kubectl("wait", "--timeout=2m", "--for=condition=Established", "crd", "--all")
	}
	compare := func(t *testing.T, run func(r *tour, s *harness.Server)) {
		var results [2][]string
		for i, s := range servers {
			r := &tour{t: t}
			run(r, s)
			results[i] = r.lines
		}
		if len(results[0]) < 10 || len(results[0]) != len(results[1]) {
			t.Fatalf("%d steps with kube-apiserver, %d with Watershed", len(results[0]), len(results[1]))
		}
		for i := range results[0] {
			if want, got := masked(results[0][i]), masked(results[1][i]); want != got {
				t.Errorf("%s\nwant %s", got, want)
			}
		}
	}
	t.Run("typed", func(t *testing.T) { compare(t, (*tour).typed) })
	t.Run("dynamic", func(t *testing.T) { compare(t, (*tour).dynamic) })
	t.Run("JavaScript", func(t *testing.T) {
		modules := nodeModules(t)
		compare(t, func(r *tour, s *harness.Server) { r.javaScript(s, modules) })
	})
}
