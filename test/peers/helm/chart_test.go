package helm

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

const k8s = "../../../deploy/k8s"

type object = map[string]any

// objects returns the objects of a text by kind and name.
func objects(t *testing.T, text string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for doc := range strings.SplitSeq(text, "\n---\n") {
		o := object{}
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		if len(o) > 0 {
			all[fmt.Sprint(o["kind"], "/", field(o, "metadata", "name"))] = o
		}
	}
	return all
}

// field returns a field of an object. The keys are names of fields, and indices of lists.
func field(o any, keys ...any) any {
	for _, k := range keys {
		switch v := o.(type) {
		case object:
			o = v[k.(string)]
		case []any:
			o = v[k.(int)]
		default:
			return nil
		}
	}
	return o
}

// render returns the objects of the chart with values, as the first revision of a release.
func render(t *testing.T, namespace, values string) (map[string]object, error) {
	t.Helper()
	chart, err := loader.Load(k8s + "/chart")
	if err != nil {
		t.Fatal(err)
	}
	v := map[string]any{}
	if err := yaml.Unmarshal([]byte(values), &v); err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "watershed", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(chart, v, release, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	for name, file := range files {
		if strings.HasSuffix(name, ".yaml") {
			text.WriteString(file + "\n---\n")
		}
	}
	return objects(t, text.String()), nil
}

// TestTheChartInstallsTheOverlays compares the chart's objects with the rendered overlays. The chart has no Namespace,
// because Helm creates it. The Job has the number of the revision, because a Job cannot change.
func TestTheChartInstallsTheOverlays(t *testing.T) {
	for _, overlay := range []string{"dev", "ha", "compact"} {
		got, err := render(t, "watershed", "overlay: "+overlay)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(k8s, "rendered", overlay+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		want := objects(t, string(text))
		delete(want, "Namespace/watershed")
		if got["Pod/probe"] == nil || got["Job/certgen-1"] == nil {
			t.Fatalf("%s: the test's Pod or the Job is missing", overlay)
		}
		delete(got, "Pod/probe")
		got["Job/certgen"] = got["Job/certgen-1"]
		delete(got, "Job/certgen-1")
		got["Job/certgen"]["metadata"].(object)["name"] = "certgen"
		for _, name := range []string{"PriorityClass/watershed", "PriorityClass/watershed-storage"} {
			class := got[name]["metadata"].(object)
			if field(class, "annotations", "helm.sh/resource-policy") != "keep" {
				t.Errorf("%s: the %s of all releases is deleted with the first release", overlay, name)
			}
			delete(class, "annotations")
		}
		if len(want) < 20 || len(got) != len(want) {
			t.Errorf("%s: %d objects, want %d", overlay, len(got), len(want))
		}
		for name, o := range want {
			if !reflect.DeepEqual(got[name], o) {
				t.Errorf("%s: %s differs:\n%v\nwant\n%v", overlay, name, got[name], o)
			}
		}
	}
}

// TestTheChartTakesItsValues checks the effect of each value, and that no object stays in another namespace.
func TestTheChartTakesItsValues(t *testing.T) {
	got, err := render(t, "other", `
overlay: ha
image: {registry: "registry.example.com:5000/a", tag: v9.9.9, pullPolicy: Always, pullSecrets: [pull]}
gatewayNames: [api.example.com, 10.0.0.1]
gatewayService: {annotations: {a: b}, spec: {type: LoadBalancer}}
workloads:
  gateway:
    replicas: 5
    resources: {limits: {memory: 3Gi}}
    args: [--v=4]
    podAnnotations: {c: d}
    podLabels: {e: f}
    pod: {nodeSelector: {g: h}}
  registry:
    env: [{name: WATERSHED_ETCD_SERVERS, value: "https://etcd.example.com:2379"}]
    volumes: [{name: etcd, secret: {secretName: external-etcd}}]
    volumeMounts: [{name: etcd, mountPath: /etc/watershed/etcd}]
  certgen: {pod: {nodeSelector: {g: h}}}
  probe: {args: [--interval=5s]}
probe: {enabled: true}
omit: [StatefulSet/etcd, Service/etcd]
etcdStorage: {size: 64Gi, className: fast}
autoscaling: {enabled: true}
monitoring: {enabled: true, labels: {release: prometheus}}
`)
	if err != nil {
		t.Fatal(err)
	}
	want := func(want any, name string, keys ...any) {
		t.Helper()
		if v := field(got[name], keys...); !reflect.DeepEqual(v, want) {
			t.Errorf("%s %v: %v, want %v", name, keys, v, want)
		}
	}
	pod := []any{"spec", "template", "spec"}
	container := append(pod[:3:3], "containers", 0)
	in := func(path []any, keys ...any) []any { return append(path[:len(path):len(path)], keys...) }
	const gateway, registry = "Deployment/gateway", "Deployment/registry"
	want(5.0, gateway, "spec", "replicas")
	want("registry.example.com:5000/a/gateway:v9.9.9", gateway, in(container, "image")...)
	want("registry.example.com:5000/a/watershed:v9.9.9", "Pod/probe", "spec", "containers", 0, "image")
	want("Always", gateway, in(container, "imagePullPolicy")...)
	want([]any{object{"name": "pull"}}, gateway, in(pod, "imagePullSecrets")...)
	want("3Gi", gateway, in(container, "resources", "limits", "memory")...)
	want("128Mi", gateway, in(container, "resources", "requests", "memory")...)
	want("d", gateway, "spec", "template", "metadata", "annotations", "c")
	want("8081", gateway, "spec", "template", "metadata", "annotations", "prometheus.io/port")
	want("f", gateway, "spec", "template", "metadata", "labels", "e")
	want("h", gateway, in(pod, "nodeSelector", "g")...)
	want(true, gateway, in(pod, "securityContext", "runAsNonRoot")...)
	want("h", "Job/certgen-1", in(pod, "nodeSelector", "g")...)
	want("h", "CronJob/certgen", in(append([]any{"spec", "jobTemplate"}, pod...), "nodeSelector", "g")...)
	want("registry.example.com:5000/a/watershed:v9.9.9", "Deployment/probe", in(container, "image")...)
	want("--interval=5s", "Deployment/probe", in(container, "args", 3)...)
	want("LoadBalancer", "Service/gateway", "spec", "type")
	want("b", "Service/gateway", "metadata", "annotations", "a")
	want("api.example.com,10.0.0.1", "ConfigMap/gateway-names", "data", "names")
	want(nil, "Deployment/watchfanout", "spec", "replicas")
	want("watchfanout", "HorizontalPodAutoscaler/watchfanout", "spec", "scaleTargetRef", "name")
	want("prometheus", "PrometheusRule/watershed", "metadata", "labels", "release")
	want("watershed", "PodMonitor/watershed", "metadata", "labels", "app.kubernetes.io/part-of")
	args := field(got[gateway], in(container, "args")...).([]any)
	if args[len(args)-1] != "--v=4" || args[0] != "--bind-address=0.0.0.0" {
		t.Errorf("args %v", args)
	}
	env := fmt.Sprint(field(got[registry], in(container, "env")...))
	if strings.Count(env, "WATERSHED_ETCD_SERVERS") != 1 || !strings.Contains(env, "etcd.example.com") ||
		!strings.Contains(env, "WATERSHED_NATS_URL") {
		t.Errorf("env %s", env)
	}
	mounts := fmt.Sprint(field(got[registry], in(container, "volumeMounts")...))
	if !strings.Contains(mounts, "/etc/watershed/etcd") || !strings.Contains(mounts, "/etc/watershed/pki") {
		t.Errorf("volumeMounts %s", mounts)
	}
	if boards := got["ConfigMap/watershed-dashboards"]; len(field(boards, "data").(object)) != 5 {
		t.Errorf("dashboards: %v", field(boards, "data"))
	}
	if got["StatefulSet/etcd"] != nil || got["Service/etcd"] != nil || got["StatefulSet/nats"] == nil {
		t.Error("omit does not leave out etcd only")
	}
	for name, o := range got {
		text, _ := yaml.Marshal(o)
		if other := regexp.MustCompile(`namespace: (.*)`).FindAllStringSubmatch(string(text), -1); len(other) > 0 {
			for _, m := range other {
				if m[1] != "other" && o["kind"] != "ConfigMap" {
					t.Errorf("%s names the namespace %s", name, m[1])
				}
			}
		}
	}
	got, err = render(t, "watershed", "{overlay: ha, etcdStorage: {size: 64Gi, className: fast}}")
	if err != nil {
		t.Fatal(err)
	}
	claim := []any{"spec", "volumeClaimTemplates", 0, "spec"}
	want("64Gi", "StatefulSet/etcd", in(claim, "resources", "requests", "storage")...)
	want("fast", "StatefulSet/etcd", in(claim, "storageClassName")...)
}

// TestTheChartTakesValuesOfEveryWorkload sets the values of each workload of the overlays.
func TestTheChartTakesValuesOfEveryWorkload(t *testing.T) {
	for _, overlay := range []string{"dev", "ha", "compact"} {
		all, err := render(t, "watershed", "overlay: "+overlay)
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range all {
			kind, workload, _ := strings.Cut(name, "/")
			if field(o, "spec", "template") == nil {
				continue
			}
			got, err := render(t, "watershed", `
overlay: `+overlay+`
workloads:
  `+strings.TrimSuffix(workload, "-1")+`:
    args: [--a=b]
    env: [{name: A, value: b}]
    volumes: [{name: a, emptyDir: {}}]
    volumeMounts: [{name: a, mountPath: /a}]
    resources: {requests: {cpu: "1"}}
    pod: {priorityClassName: other}
`)
			if err != nil {
				t.Errorf("%s, %s: %v", overlay, name, err)
				continue
			}
			text, _ := yaml.Marshal(got[name])
			for _, want := range []string{"- --a=b\n", "name: A\n", "emptyDir: {}\n", "mountPath: /a\n", "cpu: \"1\"\n",
				"priorityClassName: other\n"} {
				if !strings.Contains(string(text), want) {
					t.Errorf("%s: the %s %s lacks %q", overlay, kind, workload, want)
				}
			}
		}
	}
}

// TestTheSchemaNamesABadValue checks the errors of values that the chart does not have.
func TestTheSchemaNamesABadValue(t *testing.T) {
	for values, want := range map[string]string{
		"overlay: big":                             "overlay",
		"replicas: 3":                              "replicas",
		"workloads: {gatway: {replicas: 3}}":       "gatway",
		"workloads: {gateway: {replicas: -1}}":     "replicas",
		"workloads: {gateway: {args: [v]}}":        "args",
		"image: {registry: 'https://example.com'}": "registry",
		"omit: [etcd]":                             "omit",
		"workloads: {gateway: {replicas: 3}}":      "workloads: gateway: the overlay compact has front, watchfanout, ",
		"workloads: {probe: {replicas: 1}}":        "workloads: probe: the overlay compact has ",
		"omit: [Deployment/gateway]":               "omit: Deployment/gateway: the overlay compact has ",
	} {
		if _, err := render(t, "watershed", values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", values, err, want)
		}
	}
}

// TestTheChartIsLinted runs the checks of `helm lint`.
func TestTheChartIsLinted(t *testing.T) {
	for _, m := range lint.RunAll(k8s+"/chart", nil, "watershed").Messages {
		if m.Severity > support.InfoSev {
			t.Error(m.Error())
		}
	}
}

// TestTheChartsVersionIsTheImages checks that the chart's version, its appVersion and the tag of every image agree.
func TestTheChartsVersionIsTheImages(t *testing.T) {
	chart, err := loader.Load(k8s + "/chart")
	if err != nil {
		t.Fatal(err)
	}
	if "v"+chart.Metadata.Version != chart.Metadata.AppVersion {
		t.Errorf("version %s, appVersion %s", chart.Metadata.Version, chart.Metadata.AppVersion)
	}
	files := append(chart.Templates, chart.Files...)
	images := 0
	for _, f := range files {
		for _, m := range regexp.MustCompile(`watershed\.dev/[a-z]+:([\w.-]+)`).FindAllStringSubmatch(string(f.Data), -1) {
			if images++; m[1] != chart.Metadata.AppVersion {
				t.Errorf("%s has %s, want the tag %s", f.Name, m[0], chart.Metadata.AppVersion)
			}
		}
	}
	if images < 30 {
		t.Errorf("%d images", images)
	}
}
