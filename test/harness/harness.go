// Package harness starts the servers of the tests: Watershed as `up` and as `split`, kube-apiserver as the oracle, and
// the controllers of a cluster. Every process uses free ports and its own directory, and ends with the test.
package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"watershed.dev/platform/pki"
)

// Root returns the root directory of the repository.
func Root() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// Peer returns the path of a peer's binary, which `make peers` builds.
func Peer(name string) string { return filepath.Join(Root(), ".build", "bin", name) }

// Watershed returns the path of the binary under test, which `make build` builds.
func Watershed() string { return filepath.Join(Root(), "bin", "watershed") }

// FreePort returns a port without a listener. The port is below ip_local_port_range and the node ports, so no
// connection takes it before the caller listens.
func FreePort(t testing.TB) int {
	const lowest, highest = 12000, 29999
	for range 1000 {
		port := lowest + rand.IntN(highest-lowest)
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// Server is a running API server: Watershed or kube-apiserver.
type Server struct {
	t          testing.TB
	Dir        string
	Kubeconfig string
	Port       int
	// SAKey and CA (a path without its extension) are the keys that a controller manager signs with.
	SAKey, CA string
	process   *Process
}

// Process is a child process with its own process group.
type Process struct {
	t    testing.TB
	Cmd  *exec.Cmd
	Log  string
	done chan struct{}
	err  error
}

// Start runs a program until the test ends. Its output goes to dir/name.log; a failed test prints the end of that file.
func Start(t testing.TB, dir, name, program string, args ...string) *Process {
	t.Helper()
	log := filepath.Join(dir, name+".log")
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	p := &Process{t: t, Cmd: cmd, Log: log, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("the end of %s:\n%s", log, tail(log, 3000))
		}
	})
	return p
}

// Stop sends SIGTERM and waits for the process to end. It kills the process after 20 s.
func (p *Process) Stop() {
	_ = p.Cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		p.Kill()
	}
}

// Wait waits for the process to exit and returns its error. After within it kills the process and fails the test.
func (p *Process) Wait(within time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-time.After(within):
		p.Kill()
		p.t.Errorf("%s did not exit within %v", p.Cmd.Path, within)
		return nil
	}
}

// Kill ends the process group with SIGKILL.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.Cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

func tail(path string, n int) string {
	b, _ := os.ReadFile(path)
	return string(b[max(0, len(b)-n):])
}

// Up starts `watershed up` in dir ("" for a new directory) with more flags.
func Up(t testing.TB, dir string, flags ...string) *Server { return start(t, "up", dir, flags) }

// Split starts `watershed split` in dir ("" for a new directory) with more flags.
func Split(t testing.TB, dir string, flags ...string) *Server { return start(t, "split", dir, flags) }

func start(t testing.TB, form, dir string, flags []string) *Server {
	t.Helper()
	if dir == "" {
		dir = TempDir(t)
	}
	s := &Server{
		t:          t,
		Dir:        dir,
		Kubeconfig: filepath.Join(dir, "admin.kubeconfig"),
		SAKey:      filepath.Join(dir, "pki", "sa.key"),
		CA:         filepath.Join(dir, "pki", "ca"),
	}
	for i, f := range flags {
		if p, ok := strings.CutPrefix(f, "--secure-port="); ok {
			s.Port, _ = strconv.Atoi(p)
			flags = append(flags[:i:i], flags[i+1:]...)
			break
		}
	}
	if s.Port == 0 {
		s.Port = FreePort(t)
	}
	_ = os.Remove(filepath.Join(dir, form+".log")) // an earlier run's log contains the line that marks readiness
	args := append([]string{form, "--data-dir", dir, "--bind-address", "127.0.0.1",
		"--secure-port", fmt.Sprint(s.Port)}, flags...)
	s.process = Start(t, dir, form, Watershed(), args...)
	s.waitFor("Ready after")
	return s
}

// TempDir returns a directory whose path is short enough for Unix sockets.
func TempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "ws")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (s *Server) waitFor(text string) {
	s.t.Helper()
	Eventually(s.t, time.Minute, func() error {
		select {
		case <-s.process.done:
			s.t.Fatalf("the server ended (%v):\n%s", s.process.err, tail(s.process.Log, 3000))
		default:
		}
		if b, _ := os.ReadFile(s.process.Log); !bytes.Contains(b, []byte(text)) {
			return fmt.Errorf("no %q yet in %s", text, s.process.Log)
		}
		return nil
	})
}

// Stop stops the server with SIGTERM. Its directory stays.
func (s *Server) Stop() { s.process.Stop() }

// Kill ends the server with SIGKILL.
func (s *Server) Kill() { s.process.Kill() }

// StopListening sends SIGTERM and waits until the server's port has no listener. The process may take longer to end:
// kube-apiserver takes a minute if clients watch.
func (s *Server) StopListening() {
	s.t.Helper()
	_ = s.process.Cmd.Process.Signal(syscall.SIGTERM)
	Eventually(s.t, time.Minute, func() error {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", s.Port), time.Second)
		if err != nil {
			return nil
		}
		c.Close()
		return errors.New("the server still listens")
	})
}

// PID returns the process ID of the server. For `split` it is the supervisor's.
func (s *Server) PID() int { return s.process.Cmd.Process.Pid }

// Output returns the last 1 MiB that the server printed.
func (s *Server) Output() string { return tail(s.process.Log, 1<<20) }

// Config returns the administrator's client config, without client-side rate limits.
func (s *Server) Config() *rest.Config {
	c, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig)
	if err != nil {
		s.t.Fatal(err)
	}
	c.QPS = -1
	return c
}

// Client returns the administrator's clientset.
func (s *Server) Client() *kubernetes.Clientset { return kubernetes.NewForConfigOrDie(s.Config()) }

// Kubectl runs kubectl and returns its output. It fails the test if kubectl fails.
func (s *Server) Kubectl(args ...string) string {
	s.t.Helper()
	out, err := s.TryKubectl("", args...)
	if err != nil {
		s.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// TryKubectl runs kubectl with input on stdin.
func (s *Server) TryKubectl(input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, Peer("kubectl"),
		append([]string{"--kubeconfig", s.Kubeconfig, "--cache-dir", filepath.Join(s.Dir, "kubectl-cache")},
			args...)...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Apply runs kubectl apply with a manifest and returns its output.
func (s *Server) Apply(manifest string, flags ...string) string {
	s.t.Helper()
	out, err := s.TryKubectl(manifest, append([]string{"apply", "-f", "-"}, flags...)...)
	if err != nil {
		s.t.Fatalf("kubectl apply: %v\n%s", err, out)
	}
	return out
}

// Managers runs kube-controller-manager, with more flags, and kube-scheduler, without nodes. It returns the directory
// of their logs.
func (s *Server) Managers(flags ...string) string {
	s.t.Helper()
	dir := TempDir(s.t)
	Start(s.t, dir, "kube-controller-manager", Peer("kube-controller-manager"), append([]string{
		"--kubeconfig", s.Identity("system:kube-controller-manager"),
		"--service-account-private-key-file", s.SAKey,
		"--use-service-account-credentials", "--root-ca-file", s.CA + ".crt",
		"--cluster-signing-cert-file", s.CA + ".crt", "--cluster-signing-key-file", s.CA + ".key",
		"--leader-elect=false", "--secure-port", "0", "--controllers", "*"}, flags...)...)
	Start(s.t, dir, "kube-scheduler", Peer("kube-scheduler"),
		"--kubeconfig", s.Identity("system:kube-scheduler"),
		"--leader-elect=false", "--secure-port", "0")
	return dir
}

// Identity returns the path of a kubeconfig for a user in groups. Its client certificate is signed by the cluster's CA.
func (s *Server) Identity(user string, groups ...string) string {
	s.t.Helper()
	name := strings.ReplaceAll(user, ":", "-")
	cert, key := s.leaf(pki.Leaf{Name: name, CommonName: user, Organizations: groups, Usage: pki.Client})
	path := filepath.Join(s.Dir, name+".kubeconfig")
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: s.Config().Host, InsecureSkipTLSVerify: true}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificate: cert, ClientKey: key}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	conf.CurrentContext = "x"
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// ServingCertificate returns a serving certificate for names and addresses, signed by the cluster's CA.
func (s *Server) ServingCertificate(name string, names ...string) (cert, key string) {
	s.t.Helper()
	return s.leaf(pki.Leaf{Name: name, CommonName: name, SANs: names, Usage: pki.Server})
}

func (s *Server) leaf(l pki.Leaf) (cert, key string) {
	s.t.Helper()
	ca, err := pki.OpenCA(filepath.Dir(s.CA), filepath.Base(s.CA), "kubernetes")
	if err == nil {
		cert, key, _, err = ca.Leaf(l)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return cert, key
}

// Controllers runs kube-controller-manager, kube-scheduler and kwok with three nodes.
func (s *Server) Controllers() {
	s.t.Helper()
	dir := s.Managers()
	port := fmt.Sprint(FreePort(s.t))
	cert, key := s.ServingCertificate("kwok", "127.0.0.1")
	Start(s.t, dir, "kwok", Peer("kwok"), "--kubeconfig", s.Kubeconfig, "--manage-all-nodes=true", "--node-ip",
		"127.0.0.1", "--node-port", port, "--cidr", "10.244.0.0/16",
		"--server-address", "127.0.0.1:"+port, "--tls-cert-file", cert, "--tls-private-key-file", key, "--config", stages(s.t, dir), "--node-lease-duration-seconds", "40")
	var nodes strings.Builder
	for i := range 3 {
		fmt.Fprintf(&nodes, `---
apiVersion: v1
kind: Node
metadata: {name: kwok-%d, labels: {kubernetes.io/hostname: kwok-%d, kubernetes.io/os: linux, kubernetes.io/arch: amd64}, annotations: {kwok.x-k8s.io/node: fake}}
status: {allocatable: {cpu: 32, memory: 256Gi, pods: 110}, capacity: {cpu: 32, memory: 256Gi, pods: 110}}
`, i, i)
	}
	s.Apply(nodes.String())
}

// stages writes kwok's default stages into one file: nodes become Ready, pods run or complete.
func stages(t testing.TB, dir string) string {
	out, err := exec.Command("go", "list", "-C", filepath.Join(Root(), "test"), "-m", "-f",
		"{{.Dir}}", "sigs.k8s.io/kwok").Output()
	if err != nil {
		t.Fatalf("find kwok's module: %v", err)
	}
	var all bytes.Buffer
	for _, s := range []string{"node/fast", "node/heartbeat-with-lease", "pod/fast"} {
		files, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "kustomize", "stage", s, "*.yaml"))
		for _, f := range files {
			if filepath.Base(f) == "kustomization.yaml" {
				continue
			}
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
			all.WriteString("\n---\n")
		}
	}
	path := filepath.Join(dir, "stages.yaml")
	if err := os.WriteFile(path, all.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Eventually polls f until it returns nil. After within it fails the test with f's last error.
func Eventually(t testing.TB, within time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %v", within, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func get(c *http.Client, url string) error {
	resp, err := c.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, b)
	}
	return nil
}

// Dialer returns a dial function of its own. A config with this function gets new connections, because client-go
// shares connections between equal configs.
func (s *Server) Dialer() func(context.Context, string, string) (net.Conn, error) {
	d := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		return d.DialContext(ctx, network, address)
	}
}

// HostAddress returns an address of this machine that is not loopback, because endpoints cannot be loopback addresses.
func HostAddress(t testing.TB) string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	t.Skip("this machine has no address but loopback")
	return ""
}

// Scale sets the number of a split's processes, one "service=N" for each service.
func (s *Server) Scale(to ...string) {
	s.t.Helper()
	args := append([]string{"split", "scale", "--data-dir", s.Dir}, to...)
	if out, err := exec.Command(Watershed(), args...).CombinedOutput(); err != nil {
		s.t.Fatalf("scale %v: %v\n%s", to, err, out)
	}
}

// Debug returns a client of the debug address of a process of `split`, such as "gateway-0". It ignores the host of
// the URL.
func (s *Server) Debug(process string) *http.Client {
	s.t.Helper()
	conf, err := os.ReadFile(filepath.Join(s.Dir, "config", process+".yaml"))
	if err != nil {
		s.t.Fatal(err)
	}
	socket := string(regexp.MustCompile(`debug-address: (\S+)`).FindSubmatch(conf)[1])
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
}

// Metric returns the value of a metric without labels of a process of `split`.
func (s *Server) Metric(process, name string) (n float64) {
	s.t.Helper()
	resp, err := s.Debug(process).Get("http://" + process + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindSubmatch(text)
	if m == nil {
		s.t.Fatalf("%s has no metric %s", process, name)
	}
	_, _ = fmt.Sscan(string(m[1]), &n)
	return n
}

// Log returns the log of a server of `up`.
func (s *Server) Log() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, "watershed.log"))
	return string(b)
}

// Get requests a path as the administrator and returns the status code and the body.
func (s *Server) Get(path string) (int, string) {
	c, err := rest.HTTPClientFor(s.Config())
	if err != nil {
		return 0, err.Error()
	}
	resp, err := c.Get(s.Config().Host + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}
