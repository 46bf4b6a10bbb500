// Package harness starts the servers of the tests: Watershed as `up` and as `split`, kube-apiserver as the oracle, and
// the controllers of a cluster. Every process uses free ports and its own directory, and ends with the test.
package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	"watershed.dev/platform/porttest"
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

// Up starts `watershed up` in dir ("" for a new directory) with more flags.
func Up(t testing.TB, dir string, flags ...string) *Server { return start(t, "up", dir, flags) }

// Split starts `watershed split` in dir ("" for a new directory) with more flags.
func Split(t testing.TB, dir string, flags ...string) *Server { return start(t, "split", dir, flags) }

// Compact starts `watershed split --placement=compact` in dir ("" for a new directory) with more flags.
func Compact(t testing.TB, dir string, flags ...string) *Server {
	return Split(t, dir, append(flags, "--placement=compact")...)
}

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
		s.Port = porttest.FreePort(t)
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
	Eventually(s.t, 5*time.Minute, func() error {
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

// StopWithin stops the server with SIGTERM. It kills the server and fails the test if it has not ended after timeout.
func (s *Server) StopWithin(timeout time.Duration) {
	s.t.Helper()
	_ = s.process.Cmd.Process.Signal(syscall.SIGTERM)
	_ = s.process.Wait(timeout)
}

// Kill ends the server with SIGKILL.
func (s *Server) Kill() { s.process.Kill() }

// StopListening sends SIGTERM and waits until the server's port has no listener. The process may take longer to end:
// kube-apiserver takes a minute if clients watch.
func (s *Server) StopListening() {
	s.t.Helper()
	_ = s.process.Cmd.Process.Signal(syscall.SIGTERM)
	Eventually(s.t, Soon, func() error {
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
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // kubectl wait has --timeout=2m
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

// Soon is the timeout of a wait for a state if the test asserts nothing about the time. On a busy machine, a process
// needs 15 s to start. A test that passes waits no longer than it must.
const Soon = 2 * time.Minute

// BeforeRefresh is the timeout of a wait, instead of Soon, if a periodic refresh would hide a lost notification. The
// period is a minute: reload.pollPeriod, aggregation.refreshInterval, conversion.versionTTL or admission.maxIndexAge.
const BeforeRefresh = 40 * time.Second

// Eventually polls f until it returns nil. It fails the test with f's last error after timeout. It repeats a long call
// less often, because other tests use the processors.
func Eventually(t testing.TB, timeout time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for {
		began := time.Now()
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %v", timeout, err)
		}
		time.Sleep(max(50*time.Millisecond, min(time.Second, 3*time.Since(began))))
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

// CheckHealthy returns an error unless a process of `split` serves.
func (s *Server) CheckHealthy(process string) error {
	s.t.Helper()
	resp, err := s.Debug(process).Get("http://" + process + "/healthz")
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", process, resp.Status)
	}
	return nil
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
	m := regexp.MustCompile(`(?m)^` + name + `(?:\{.*\})? (\S+)$`).FindSubmatch(text)
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
	config := s.Config()
	c, err := HTTPClient(config)
	if err != nil {
		return 0, err.Error()
	}
	resp, err := c.Get(config.Host + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}
