package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"watershed.dev/test/harness"
)

// overlays are the overlays of deploy/k8s.
var overlays = []string{"dev", "ha", "compact"}

// rendered returns the manifests that kustomize builds from an overlay.
func rendered(t *testing.T, overlay string) string {
	t.Helper()
	out, err := exec.Command(harness.Peer("kubectl"), "kustomize",
		filepath.Join(harness.Root(), "deploy", "k8s", "overlays", overlay)).Output()
	if err != nil {
		t.Fatalf("%s: %v", overlay, err)
	}
	return string(out)
}

// TestManifestsAreRendered checks that deploy/k8s/rendered is current, so that a diff shows the effect of a change to
// a base.
func TestManifestsAreRendered(t *testing.T) {
	for _, overlay := range overlays {
		file := filepath.Join(harness.Root(), "deploy", "k8s", "rendered", overlay+".yaml")
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if rendered(t, overlay) != string(want) {
			t.Errorf("%s is out of date: run `make manifests`", file)
		}
	}
}

// TestManifestsAreTaken checks that Watershed and kube-apiserver accept the overlays without a warning, with strict
// validation and enforced Pod security.
func TestManifestsAreTaken(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]*harness.Server{"watershed": harness.Up(t, ""),
		"kube-apiserver": harness.Oracle(t)} {
		s.Kubectl("apply", "-f", filepath.Join(harness.Root(), "deploy", "k8s", "overlays", "dev", "namespace.yaml"))
		s.Kubectl("label", "namespace", "watershed", "pod-security.kubernetes.io/warn=restricted")
		for _, overlay := range overlays {
			out, err := s.TryKubectl(rendered(t, overlay), "apply", "--dry-run=server", "--validate=strict", "-f", "-")
			if err != nil || strings.Contains(out, "Warning") {
				t.Errorf("%s, %s: %v\n%s", name, overlay, err, out)
			}
		}
	}
}

// TestSplitScales checks that services of a running split scale while a client watches, even if the xDS server dies.
func TestSplitScales(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "", "--replicas=watchfanout=1")
	seen := filepath.Join(s.Dir, "seen")
	out, err := os.Create(seen)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	watch := exec.Command(
		harness.Peer("kubectl"),
		"--kubeconfig",
		s.Kubeconfig,
		"get",
		"configmaps",
		"-w",
		"-o",
		"name",
	)
	watch.Stdout = out
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Process.Kill(); _ = watch.Wait() }()
	create := func(name string) {
		t.Helper()
		s.Kubectl("create", "configmap", name)
		harness.Eventually(t, harness.Soon, func() error {
			text, err := os.ReadFile(seen)
			if !strings.Contains(string(text), "configmap/"+name+"\n") {
				return fmt.Errorf("%s is not seen: %q, %v", name, text, err)
			}
			return nil
		})
	}
	found := func(n int) {
		t.Helper()
		harness.Eventually(t, harness.Soon, func() error {
			files, err := filepath.Glob(
				filepath.Join(s.Dir, "xds", "gateway-*", "watchfanout"),
			) // only gateways that have sent calls
			if len(files) == 0 {
				return fmt.Errorf("no gateway has a replica: %v", err)
			}
			for _, f := range files {
				text, err := os.ReadFile(f)
				if got := len(strings.Fields(string(text))); got != n {
					return fmt.Errorf("%s has %d replicas, want %d (%v)", f, got, n, err)
				}
			}
			return nil
		})
	}
	create("one")
	s.Scale("watchfanout=3")
	found(3)
	create("two")
	s.Scale("watchfanout=1", "authz=2")
	found(1)
	create("three")
	kill(t, filepath.Join(s.Dir, "xds-0.pid"))
	create("four")
	s.Scale("watchfanout=2")
	found(2)
	create("five")
	for _, odd := range []string{"watchfanout=0", "nobody=2", "watchfanout=x", "watchfanout=1000"} {
		out, err := exec.Command(harness.Watershed(), "split", "scale", "--data-dir", s.Dir, odd).CombinedOutput()
		if err == nil || !strings.Contains(string(out), odd) {
			t.Errorf("%s is accepted: %s", odd, out)
		}
	}
}

// TestUpWithControllers checks that the README's first Deployment gets its pods.
func TestUpWithControllers(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "", "--with-controllers", "--controllers-path", filepath.Join(harness.Root(), ".build", "bin"))
	s.Kubectl("create", "deployment", "web", "--image=web", "--replicas=2")
	s.Kubectl("rollout", "status", "deployment/web", "--timeout=120s")
	refused(t, exec.Command(harness.Watershed(), "up", "--with-controllers", "--controllers-path=/does/not/exist",
		"--data-dir", t.TempDir()), "--with-controllers: kwok-stages.yaml not found")
}

// renderedWith returns the manifests of overlays/dev with further components.
func renderedWith(t *testing.T, components ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp(filepath.Join(harness.Root(), ".build"), "overlay")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	overlay := `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: watershed
resources: [../../deploy/k8s/overlays/dev]
components:
`
	for _, c := range components {
		overlay += "- ../../deploy/k8s/components/" + c + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(harness.Peer("kubectl"), "kustomize", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", components, err, out)
	}
	return string(out)
}

// TestComponentsCombine checks that each component applies to both placements. The settings that components give
// registry reach the front, also if compact comes last.
func TestComponentsCombine(t *testing.T) {
	t.Parallel()
	for _, component := range []string{"autoscaling", "cert-manager", "external-etcd", "monitoring", "network-policies",
		"probe"} {
		renderedWith(t, component)
		renderedWith(t, "compact", component)
	}
	for _, components := range [][]string{{"compact", "external-etcd"}, {"external-etcd", "compact"}} {
		_, front, _ := strings.Cut(renderedWith(t, components...), "name: front\n  namespace")
		front, _, _ = strings.Cut(front, "\n---\n")
		for _, setting := range []string{"WATERSHED_TRACING_ENDPOINT", "name: external-etcd", "secretName: external-etcd"} {
			if strings.Count(front, setting) != 1 {
				t.Errorf("%v: %s is not in the front once:\n%s", components, setting, front)
			}
		}
	}
}

// TestCertManagersSecretsMatchThePods checks cert-manager's component: a pod mounts every PKI file that its config
// names, from a Secret that a Certificate creates.
func TestCertManagersSecretsMatchThePods(t *testing.T) {
	checkMounts(t, 9, renderedWith(t, "cert-manager"))
	checkMounts(t, 5, renderedWith(t, "compact", "cert-manager"))
}

// checkMounts checks the PKI files of the pods in manifests. want is the number of pods with a PKI.
func checkMounts(t *testing.T, want int, manifests string) {
	t.Helper()
	kubeconfigs, made, pods := map[string]string{}, map[string]bool{}, 0
	var workloads []workload
	for _, doc := range strings.Split(manifests, "\n---\n") {
		var w workload
		if err := yaml.Unmarshal([]byte(doc), &w); err != nil {
			t.Fatal(err)
		}
		switch w.Kind {
		case "ConfigMap":
			kubeconfigs[w.Metadata.Name] = fmt.Sprint(w.Data)
		case "Certificate":
			made[w.Spec.SecretName] = true
		case "Deployment", "StatefulSet":
			workloads = append(workloads, w)
		case "Job", "CronJob":
			t.Errorf("there is a %s %s", w.Kind, w.Metadata.Name)
		}
	}
	named := regexp.MustCompile(`/etc/watershed/pki/([a-z.-]+)`)
	for _, w := range workloads {
		mounted := map[string]bool{}
		text := perService(fmt.Sprint(w.Spec.Template.Spec.Containers))
		for _, v := range w.Spec.Template.Spec.Volumes {
			if v.Name != "pki" {
				continue
			}
			pods++
			for _, source := range v.Projected.Sources {
				if source.ConfigMap != nil {
					mounted[strings.TrimPrefix(source.ConfigMap.Name, "kubeconfig-")+".kubeconfig"] = true
					text += kubeconfigs[source.ConfigMap.Name]
					continue
				}
				if !made[source.Secret.Name] {
					t.Errorf("%s mounts %s, which no Certificate creates", w.Metadata.Name, source.Secret.Name)
				}
				for _, i := range source.Secret.Items {
					mounted[i.Path] = true
				}
			}
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !mounted[m[1]] {
				t.Errorf("%s names %s, which it does not mount", w.Metadata.Name, m[1])
			}
		}
	}
	if pods != want {
		t.Errorf("%d pods with a PKI", pods)
	}
}

// perService replaces {service} by the names of the services of --target.
func perService(container string) (all string) {
	targets := regexp.MustCompile("--target=([a-z,]+)").FindStringSubmatch(container)
	if targets == nil {
		return container
	}
	for _, service := range strings.Split(targets[1], ",") {
		all += strings.ReplaceAll(container, "{service}", service)
	}
	return all
}

// workload is the part of a manifest that describes pods or the objects that they mount.
type workload struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		SecretName string
		Template   struct {
			Spec struct {
				Containers []struct {
					Args []string
					Env  []struct{ Name, Value string }
				}
				Volumes []struct {
					Name      string
					Projected struct {
						Sources []struct {
							ConfigMap *struct{ Name string }
							Secret    struct {
								Name  string
								Items []struct{ Path string }
							}
						}
					}
				}
			}
		}
	}
}
