package cluster

import (
	"encoding/base64"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/test/harness"
	"watershed.dev/test/node"
)

var (
	run      = flag.Bool("cluster", false, "run: this machine becomes a node (as root)")
	watchers = flag.Int("watchers", 200, "the number of watching clients")
	from     = flag.String("images", "images", "the directory in .build of the first images")
	issued   = flag.Bool("cert-manager", false, "with cert-manager's certificates, instead of certgen's")
)

// programs are the binaries that `make e2e-cluster` builds beside the images.
var programs = []string{
	"kubelet",
	"kube-proxy",
	"containerd",
	"containerd-shim-runc-v2",
	"ctr",
	"pause",
	"coredns",
	"jaeger",
}

// hosted is the second Watershed, and the first Watershed, which hosts it.
type hosted struct {
	*report
	outer *harness.Server
	nodes []*node.Node
	inner *rest.Config
	// placement is the placement of the services, and tag the tag of their images. Empty: the tag of the manifests.
	placement, tag string
}

// TestWatershedAsWorkloads runs Watershed as workloads of a cluster. Clients must not notice that its pods are scaled,
// deleted and replaced, or that the placement of its services changes.
func TestWatershedAsWorkloads(t *testing.T) {
	if !*run {
		t.Skip("it makes this machine a node, as root, and takes what `make e2e-cluster` builds: run that")
	}
	for _, p := range programs {
		if _, err := os.Stat(harness.Peer(p)); err != nil {
			t.Fatalf("%v: `make e2e-cluster` builds it", err)
		}
	}
	h := &hosted{report: newReport(t), placement: *placed}
	if placements[h.placement] == nil {
		t.Fatalf("-placement %s: want split or compact", h.placement)
	}
	h.host(0, built(t, *from, "make e2e-cluster"), "coredns", "jaeger")
	h.deploy()
	h.kubectl()
	c, err := start(t.Context(), h.inner, *watchers, writePause)
	if err != nil {
		t.Fatal(err)
	}
	h.phase(c, "nothing happens", false, func() { time.Sleep(5 * time.Second) })
	for _, archive := range built(t, "images-next", "make e2e-cluster") {
		h.nodes[0].Import(t, archive)
	}
	h.phase(c, "rolling upgrade", true, h.upgrade)
	h.phase(c, "watchfanout 1 to 3", true, func() { h.scale("watchfanout", 3) })
	h.phase(c, "watchfanout 3 to 1", true, func() { h.scale("watchfanout", 1) })
	h.autoscale(c)
	for _, s := range h.services() {
		h.phase(c, "a pod of "+s+" deleted", true, func() { h.deletePod(s) })
	}
	h.phase(c, "the pod of nats deleted", true, func() { h.deletePod("nats") }) // with its log
	h.phase(c, "the pod of etcd deleted", true, func() { h.deletePod("etcd") })
	h.phase(c, "an image that does not start", true, h.broken)
	h.phase(c, "xds away for half a minute", true, func() {
		h.outer.Kubectl("-n", "watershed", "scale", "deployment/xds", "--replicas=0")
		time.Sleep(30 * time.Second) // a span without a change
		h.scale("xds", 1)
	})
	for _, to := range []string{other[h.placement], h.placement} {
		h.phase(c, h.placement+" to "+to, true, func() { h.place(to) })
	}
	for _, w := range c.stop() {
		t.Error(w)
	}
	h.table.Flush()
	h.traces()
}

// built returns the tar files of images in a directory of .build. The command builds them.
func built(t *testing.T, dir, command string) []string {
	t.Helper()
	archives, err := filepath.Glob(filepath.Join(harness.Root(), ".build", dir, "*.tar"))
	if err != nil || len(archives) == 0 {
		t.Fatalf("no images in .build/%s: `%s` builds them (%v)", dir, command, err)
	}
	return archives
}

// host starts a Watershed with nodes, DNS, and a volume of each node. The nodes are that number of hosts, or this
// machine if hosts is 0. They have the images of the archives, and of the programs.
func (h *hosted) host(hosts int, archives []string, programs ...string) {
	node.Prepare(h)
	all := node.Hosts(h, hosts)
	if hosts == 0 {
		all = append(all, nil)
	}
	h.outer = harness.Up(h, "", append(node.Flags(), "--bind-address=0.0.0.0", "--tls-sans="+node.Address)...)
	h.outer.Managers()
	images := map[string]string{}
	for _, p := range programs {
		images["watershed.dev/"+p+":test"] = harness.Peer(p)
	}
	h.outer.Apply(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: local, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
`)
	for _, host := range all {
		n := node.Join(h, h.outer, node.Options{
			Host:     host,
			DNS:      "10.96.0.10",
			Archives: archives,
			Lean:     true,
			Programs: images,
		})
		h.nodes = append(h.nodes, n)
		h.outer.Apply(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: etcd-` + n.Name + `}
spec:
  capacity: {storage: 20Gi}
  accessModes: [ReadWriteOnce]
  storageClassName: local
  local: {path: ` + harness.TempDir(h) + `}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [` + n.Name + `]}]
`)
	}
	h.Cleanup(func() { // the end of the nodes' processes does not end their pods
		_, _ = h.outer.TryKubectl(
			"",
			"delete",
			"deployments,statefulsets,jobs,pods",
			"--all",
			"--all-namespaces",
			"--timeout=60s",
		)
	})
	dns, err := os.ReadFile("dns.yaml")
	if err != nil {
		h.Fatal(err)
	}
	h.outer.Apply(string(dns))
	h.outer.Kubectl("-n", "kube-system", "scale", "deployment/coredns", fmt.Sprintf("--replicas=%d", min(len(all), 2)))
	h.rollout("kube-system", "deployment/coredns")
}

// deploy applies overlays/dev in a placement.
func (h *hosted) deploy() {
	if *issued {
		h.certManager()
	}
	dir := h.overlay(h.placement)
	began := time.Now()
	h.outer.Kubectl("apply", "-k", dir)
	h.rollout("watershed", "deployment/"+entry[h.placement])
	fmt.Printf("\noverlays/dev as %s is ready %.1f s after kubectl apply.\n", h.placement, time.Since(began).Seconds())
	h.connect()
}

// connect reads the kubeconfig of the inner cluster's administrator.
func (h *hosted) connect() {
	h.Helper()
	kubeconfig := h.admin()
	var err error
	if h.inner, err = clientcmd.RESTConfigFromKubeConfig(kubeconfig); err != nil {
		h.Fatal(err)
	}
	address := h.outer.Kubectl("-n", "watershed", "get", "service", "gateway", "-o", "jsonpath={.spec.clusterIP}")
	h.inner.Host, h.inner.ServerName, h.inner.QPS = "https://"+address, "gateway.watershed.svc", -1
	if err := os.WriteFile(filepath.Join(h.outer.Dir, "inner.kubeconfig"), kubeconfig, 0o600); err != nil {
		h.Fatal(err)
	}
}

// admin returns the kubeconfig of the inner cluster's administrator.
func (h *hosted) admin() []byte {
	h.Helper()
	data := func(secret, key string) string {
		return h.outer.Kubectl("-n", "watershed", "get", "secret", secret, "-o",
			"jsonpath={.data."+strings.ReplaceAll(key, ".", `\.`)+"}")
	}
	if *issued {
		return fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "x",
"clusters": [{"name": "x", "cluster": {"server": "https://gateway", "certificate-authority-data": %q}}],
"users": [{"name": "x", "user": {"client-certificate-data": %q, "client-key-data": %q}}],
"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}]}`, data("pki-admin", "ca.crt"),
			data("pki-admin", "tls.crt"), data("pki-admin", "tls.key"))
	}
	kubeconfig, err := base64.StdEncoding.DecodeString(data("watershed-admin", "admin.kubeconfig"))
	if err != nil {
		h.Fatal(err)
	}
	return kubeconfig
}

// certManager runs cert-manager's controllers for the outer cluster.
func (h *hosted) certManager() {
	h.Helper()
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/cert-manager/cert-manager")
	list.Dir, list.Env = filepath.Join(
		harness.Root(),
		"test",
		"peers",
		"cert-manager",
	), append(
		os.Environ(),
		"GOWORK=off",
	)
	module, err := list.Output()
	if err != nil {
		h.Fatalf("where is cert-manager: %v", err)
	}
	crds, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(module)), "deploy", "crds", "*.yaml"))
	if err != nil || len(crds) == 0 {
		h.Fatalf("cert-manager has no CRDs (%v)", err)
	}
	for _, file := range crds {
		h.outer.Kubectl("create", "-f", file)
	}
	for _, file := range crds {
		h.outer.Kubectl("wait", "--timeout=2m", "--for=condition=Established", "-f", file)
	}
	harness.Start(
		h,
		harness.TempDir(h),
		"cert-manager",
		harness.Peer("cert-manager"),
		"-kubeconfig",
		h.outer.Kubeconfig,
	)
}

// kubectl runs kubectl against the inner gateway's Service, as a user does.
func (h *hosted) kubectl() {
	cmd := exec.Command(
		harness.Peer("kubectl"),
		"--kubeconfig",
		filepath.Join(h.outer.Dir, "inner.kubeconfig"),
		"--server",
		h.inner.Host,
		"--tls-server-name",
		h.inner.ServerName,
		"apply",
		"-f",
		"-",
	)
	cmd.Stdin = strings.NewReader(deployment)
	out, err := cmd.CombinedOutput()
	if err != nil {
		h.Fatalf("kubectl apply through the inner gateway: %v\n%s", err, out)
	}
	fmt.Printf("kubectl apply through its Service: %s", out)
	fmt.Print(h.outer.Kubectl("-n", "watershed", "get", "pods"))
	fmt.Println(memory())
}

const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: web}]}
`

// memory returns the resident memory of the pods' processes as a line of text.
func memory() string {
	all := "Resident, MB:"
	sum := 0.0
	procs, _ := exec.Command("sh", "-c",
		"find /sys/fs/cgroup/kubepods /sys/fs/cgroup/*/kubepods -name cgroup.procs -exec cat {} + 2>/dev/null "+
			"| sort -u").
		Output()
	for pid := range strings.FieldsSeq(string(procs)) {
		exe, err := os.Readlink("/proc/" + pid + "/exe")
		status, serr := os.ReadFile("/proc/" + pid + "/status")
		if err != nil || serr != nil || strings.HasSuffix(exe, "/pause") {
			continue
		}
		var kb float64
		if _, rss, ok := strings.Cut(string(status), "VmRSS:"); ok {
			_, _ = fmt.Sscan(rss, &kb)
		}
		program := filepath.Base(exe)
		all += fmt.Sprintf(" %s %.0f", program, kb/1024)
		if program != "etcd" && program != "coredns" {
			sum += kb / 1024
		}
	}
	return all + fmt.Sprintf("; all but etcd %.0f", sum)
}

func (h *hosted) rollout(namespace, workload string) {
	h.Helper()
	out, err := h.outer.TryKubectl("", "-n", namespace, "rollout", "status", workload, "--timeout=110s")
	if err != nil {
		pods, _ := h.outer.TryKubectl("", "-n", namespace, "get", "pods,events")
		h.Fatalf("%s: %v\n%s\n%s", workload, err, out, pods)
	}
}

func (h *hosted) scale(service string, replicas int) {
	h.Helper()
	h.outer.Kubectl("-n", "watershed", "scale", "deployment/"+service, fmt.Sprintf("--replicas=%d", replicas))
	h.has(service, replicas)
}

// deletePod deletes the service's pods and waits for their replacements.
func (h *hosted) deletePod(service string) {
	h.Helper()
	h.outer.Kubectl("-n", "watershed", "delete", "pod", "-l", "app.kubernetes.io/name="+service)
	kind := "deployment/"
	if service == "etcd" || service == "nats" {
		kind = "statefulset/"
	}
	h.rollout("watershed", kind+service)
	h.rollout("watershed", "deployment/"+entry[h.placement]) // it is ready when every service has been
}

// upgrade replaces every service's image by the next image.
func (h *hosted) upgrade() {
	h.Helper()
	h.tag = "next"
	for _, s := range h.services() {
		h.outer.Kubectl("-n", "watershed", "set", "image", "deployment/"+s, "watershed="+image(s)+":"+h.tag)
		h.rollout("watershed", "deployment/"+s)
	}
	for _, s := range h.services() {
		h.has(s, 1) // the old pods have gone
	}
}

// broken rolls out a missing image for every service, and rolls back. The running pods must keep serving.
func (h *hosted) broken() {
	h.Helper()
	for _, s := range h.services() {
		h.outer.Kubectl("-n", "watershed", "set", "image", "deployment/"+s, "watershed="+image(s)+":nothing")
	}
	for _, s := range h.services() {
		harness.Eventually(h, harness.Soon, func() error {
			out := h.outer.Kubectl("-n", "watershed", "get", "pods", "-l", "app.kubernetes.io/name="+s)
			if !strings.Contains(out, "ImagePull") || !strings.Contains(out, "1/1") {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
	}
	for _, s := range h.services() {
		h.outer.Kubectl("-n", "watershed", "rollout", "undo", "deployment/"+s)
		h.rollout("watershed", "deployment/"+s)
	}
}
