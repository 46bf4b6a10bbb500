package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/cmd/certgen"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
)

// controllers runs the controllers of a cluster: kube-controller-manager, kube-scheduler, and kwok, whose nodes
// simulate pods without containers. They are upstream's programs.
type controllers struct {
	enabled bool
	path    string
	nodes   int
}

func (c *controllers) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.enabled, "with-controllers", false,
		"Also run kube-controller-manager, kube-scheduler and kwok, which make peers builds.")
	fs.StringVar(&c.path, "controllers-path", "",
		"The directory of the controllers' programs. Empty: next to this program, in .build/bin, or on the PATH.")
	fs.IntVar(&c.nodes, "fake-nodes", 3, "The number of nodes that kwok simulates.")
}

// find returns the path of a program or of the file with kwok's stages.
func (c *controllers) find(program string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	binDir := filepath.Dir(self)
	places := []string{binDir, filepath.Join(binDir, "..", ".build", "bin"), filepath.Join(".build", "bin")}
	if c.path != "" {
		places = []string{c.path}
	}
	for _, dir := range places {
		if path, err := filepath.Abs(filepath.Join(dir, program)); err == nil {
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
				return path, nil
			}
		}
	}
	if c.path == "" {
		if path, err := exec.LookPath(program); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf(
		"--with-controllers: %s not found; build it with `make peers`, or set --controllers-path",
		program,
	)
}

// runner returns a runner that starts the controllers after the runners before it, and restarts them.
func (c *controllers) runner(l *layout, show *progress) (lifecycle.Runner, error) {
	if c.nodes < 0 {
		return lifecycle.Runner{}, fmt.Errorf("--fake-nodes %d: want at least 0", c.nodes)
	}
	all, err := c.programs(l, show)
	if err != nil {
		return lifecycle.Runner{}, err
	}
	ready := lifecycle.NotReady("controllers")
	return lifecycle.Runner{Name: "controllers", Ready: ready, Run: func(ctx context.Context) error {
		spawn := make(spawner)
		go spawn.run()
		for _, p := range all {
			p.start(spawn)
		}
		defer func() {
			for _, p := range slices.Backward(all) {
				p.stop()
			}
		}()
		for c.makeNodes(ctx, l.pki.Kubeconfig(nodesClient)) != nil && ctx.Err() == nil {
			_ = lifecycle.Sleep(ctx, time.Second)
		}
		ready.Set("controllers", nil)
		<-ctx.Done()
		return nil
	}}, nil
}

// nodesClient is the user of kwok. The user of admin.kubeconfig may select another cluster in that file.
const nodesClient = "kwok-controller"

// programs returns the controllers with their flags, and issues the certificates that they use.
func (c *controllers) programs(l *layout, show *progress) (all []*child, err error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	stages, err := c.find("kwok-stages.yaml")
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(ports[0])
	manager, err := l.pki.Issue(certgen.Component{Name: "controller-manager", User: "system:kube-controller-manager"})
	if err != nil {
		return nil, err
	}
	scheduler, err := l.pki.Issue(certgen.Component{Name: "scheduler", User: "system:kube-scheduler"})
	if err != nil {
		return nil, err
	}
	nodes, err := l.pki.Issue(certgen.Component{
		Name:   nodesClient,
		User:   nodesClient,
		Groups: []string{"system:masters"},
	})
	if err != nil {
		return nil, err
	}
	// --kubelet-certificate-authority requires a serving certificate of the node
	serving, key, _, err := l.pki.CA.Leaf(pki.Leaf{
		Name:       "kwok",
		CommonName: "kwok",
		SANs:       []string{"127.0.0.1"},
		Usage:      pki.Server,
	})
	if err != nil {
		return nil, err
	}
	for _, spec := range []struct {
		program string
		args    []string
	}{
		{"kube-controller-manager", []string{"--kubeconfig", manager, "--controllers", "*",
			"--use-service-account-credentials", "--leader-elect=false", "--secure-port=0",
			"--service-account-private-key-file", l.pki.File("sa.key"), "--root-ca-file", l.pki.File("ca.crt"),
			"--cluster-signing-cert-file", l.pki.File("ca.crt"), "--cluster-signing-key-file", l.pki.File("ca.key")}},
		{"kube-scheduler", []string{"--kubeconfig", scheduler, "--leader-elect=false", "--secure-port=0"}},
		{"kwok", []string{"--kubeconfig", nodes, "--config", stages,
			"--manage-all-nodes=false", "--manage-nodes-with-annotation-selector", fakeNode + "=fake",
			"--node-ip", "127.0.0.1", "--node-port", port, "--cidr", "10.244.0.0/16",
			"--tls-cert-file", serving, "--tls-private-key-file", key,
			"--server-address", "127.0.0.1:" + port, "--node-lease-duration-seconds", "40"}},
	} {
		path, err := c.find(spec.program)
		if err != nil {
			return nil, err
		}
		all = append(all, &child{
			name:    spec.program,
			dir:     l.dir,
			program: path,
			args:    spec.args,
			logs:    l.logs,
			show:    show,
		})
	}
	return all, nil
}

// fakeNode is the annotation of the nodes that kwok simulates.
const fakeNode = "kwok.x-k8s.io/node"

// makeNodes creates the nodes of kwok, and waits until the first is ready. It logs its error.
func (c *controllers) makeNodes(ctx context.Context, kubeconfig string) (err error) {
	defer func() {
		if err != nil && ctx.Err() == nil {
			slog.Warn("The nodes of kwok are not ready; retrying. See kwok.log", "error", err)
		}
	}()
	conf, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(conf)
	if err != nil {
		return err
	}
	nodes := client.CoreV1().Nodes()
	for i := range c.nodes {
		_, err := nodes.Create(ctx, newNode(i), metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	if c.nodes == 0 {
		return nil
	}
	w, err := nodes.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + newNode(0).Name})
	if err != nil {
		return err
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		node, ok := e.Object.(*corev1.Node)
		if ok && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			return nil
		}
	}
	return errors.New("the watch of nodes ended")
}

// newNode returns a node that kwok simulates.
func newNode(i int) *corev1.Node {
	name := fmt.Sprintf("fake-%d", i)
	holds := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("32"),
		corev1.ResourceMemory: resource.MustParse("256Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Annotations: map[string]string{fakeNode: "fake"},
			Labels: map[string]string{
				corev1.LabelHostname:   name,
				corev1.LabelOSStable:   "linux",
				corev1.LabelArchStable: runtime.GOARCH,
			},
		},
		Status: corev1.NodeStatus{Allocatable: holds, Capacity: holds},
	}
}
