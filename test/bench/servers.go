package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/v3"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// server is a server under measurement.
type server struct {
	name   string
	url    string
	client *http.Client
	// gzipClient accepts gzip, as client-go and kubectl do. client does not.
	gzipClient *http.Client
	// pids returns the server's processes, without etcd, with their services' names.
	pids func() map[int]string
	stop func()
	// kubeconfig is the administrator's. The directory pki beside it has the keys.
	kubeconfig string
	// etcd returns the configuration of a client of the server's etcd.
	etcd func() clientv3.Config
	// dir is the data directory of split, and idle the use of cores by its idle services.
	dir  string
	idle map[string]float64
	// firstRead is the first pod of the last read. read is the number of pods read so far.
	firstRead, read int
	// before is the usage when the measured work began.
	before map[string]float64
}

// begin marks the beginning of the measured work, and returns cpu.
func (s *server) begin() float64 {
	s.before = s.usage()
	return sum(s.before)
}

// cpu returns the CPU time that the server's processes have used, in seconds.
func (s *server) cpu() float64 { return sum(s.usage()) }

func sum(usage map[string]float64) (total float64) {
	for _, seconds := range usage {
		total += seconds
	}
	return total
}

// usage returns the CPU time in seconds by service.
func (s *server) usage() map[string]float64 {
	used := map[string]float64{}
	for pid, name := range s.pids() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil {
			used[name] += secondsOf(b)
		}
	}
	return used
}

// secondsOf returns a process's user and system time from /proc/PID/stat (proc_pid_stat(5)). The times are in
// hundredths of a second. The process name before them may contain any character.
func secondsOf(stat []byte) float64 {
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(f[11], 64)
	system, _ := strconv.ParseFloat(f[12], 64)
	return (user + system) / 100
}

// memory returns the memory that the server occupies, in megabytes: each process's anonymous memory, and each
// mapped binary once.
func (s *server) memory() (total float64) {
	mapped := map[string]float64{}
	for pid := range s.pids() {
		binary, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		mapped[binary] = max(mapped[binary], resident(pid, "RssFile:"))
		total += resident(pid, "RssAnon:")
	}
	for _, n := range mapped {
		total += n
	}
	return total
}

// resident returns a kind of a process's resident memory in megabytes (proc_pid_status(5)).
func resident(pid int, kind string) float64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == kind {
			kilobytes, _ := strconv.ParseFloat(f[1], 64)
			return kilobytes * 1024 / 1e6
		}
	}
	return 0
}

func run(dir, name, program string, args ...string) (*exec.Cmd, string) {
	path := filepath.Join(dir, name+".out")
	f, err := os.Create(path)
	check(err)
	if slices.Contains([]string{"kube-apiserver", "up", "split", "compact"}, name) {
		for _, f := range strings.Fields(*with) {
			args = append(args, strings.ReplaceAll(f, "{server}", name))
		}
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	check(cmd.Start())
	return cmd, path
}

func absolute(p string) string {
	a, err := filepath.Abs(p)
	check(err)
	return a
}

// startEtcd starts etcd with TLS, like split's etcd. dir contains the certificates.
func startEtcd(dir string) (string, *exec.Cmd) {
	client, peer := fmt.Sprintf("https://127.0.0.1:%d", freePort()), fmt.Sprintf("http://127.0.0.1:%d", freePort())
	cmd, _ := run(dir, "etcd", absolute(filepath.Join(*bin, "etcd")), "--name", "e", "--data-dir",
		filepath.Join(dir, "data"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "e="+peer,
		"--cert-file", dir+"/pki/apiserver.crt", "--key-file", dir+"/pki/apiserver.key",
		"--log-level", "error", "--quota-backend-bytes", "8589934592")
	return client, cmd
}

// etcdConfig returns the configuration of a client of etcd. crt and key may be empty: the client then presents no
// certificate.
func etcdConfig(url, ca, crt, key string) clientv3.Config {
	config, err := transport.TLSInfo{TrustedCAFile: ca, CertFile: crt, KeyFile: key}.ClientConfig()
	check(err)
	return clientv3.Config{Endpoints: []string{url}, TLS: config}
}

func startReference(dir string) *server {
	pki := filepath.Join(dir, "pki")
	port := freePort()
	makePKI(dir, port)
	etcd, ecmd := startEtcd(dir)
	time.Sleep(time.Second)
	cmd, _ := run(dir, "kube-apiserver", absolute(filepath.Join(*bin, "kube-apiserver")), "--etcd-servers", etcd,
		"--etcd-cafile", pki+"/ca.crt", "--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1",
		"--cert-dir", dir,
		"--tls-cert-file", pki+"/apiserver.crt", "--tls-private-key-file", pki+"/apiserver.key", "--client-ca-file",
		pki+"/ca.crt", "--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file", pki+"/sa.pub", "--service-account-signing-key-file", pki+"/sa.key",
		"--authorization-mode", "Node,RBAC", "--service-cluster-ip-range", "10.96.0.0/16", "--advertise-address",
		"192.0.2.1")
	s := &server{
		name:       "kube-apiserver",
		url:        fmt.Sprintf("https://127.0.0.1:%d", port),
		kubeconfig: filepath.Join(dir, "admin.kubeconfig"),
		client:     clientOf(filepath.Join(dir, "admin.kubeconfig"), false),
		gzipClient: clientOf(filepath.Join(dir, "admin.kubeconfig"), true),
		pids:       func() map[int]string { return map[int]string{cmd.Process.Pid: "kube-apiserver"} },
		stop:       func() { kill(cmd); kill(ecmd) },
		etcd:       func() clientv3.Config { return etcdConfig(etcd, pki+"/ca.crt", "", "") },
	}
	s.ready()
	return s
}

// makePKI makes the certificates, and the administrator's kubeconfig for a server at port.
func makePKI(dir string, port int) {
	cmd, out := run(dir, "pki", absolute(*watershed), "up", "--data-dir", dir,
		"--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1")
	waitFor(out, "Ready after")
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
}

func startUp(dir, name, binary string) *server {
	makePKI(dir, freePort())
	etcd, ecmd := startEtcd(dir)
	time.Sleep(time.Second)
	port := freePort()
	cmd, out := run(dir, "up", absolute(binary), "up", "--data-dir", filepath.Join(dir, "w"), "--secure-port",
		fmt.Sprint(port), "--bind-address", "127.0.0.1", "--etcd-servers", etcd, "--etcd-cafile", dir+"/pki/ca.crt")
	waitFor(out, "Ready after")
	return &server{
		name:       name,
		url:        fmt.Sprintf("https://127.0.0.1:%d", port),
		kubeconfig: filepath.Join(dir, "w", "admin.kubeconfig"),
		client:     clientOf(filepath.Join(dir, "w", "admin.kubeconfig"), false),
		gzipClient: clientOf(filepath.Join(dir, "w", "admin.kubeconfig"), true),
		pids:       func() map[int]string { return map[int]string{cmd.Process.Pid: "up"} },
		stop:       func() { kill(cmd); kill(ecmd) },
		etcd:       func() clientv3.Config { return etcdConfig(etcd, dir+"/pki/ca.crt", "", "") },
	}
}

// serviceOf returns a process's service from the name of its PID file.
func serviceOf(file string) string {
	return strings.TrimRight(strings.TrimSuffix(file, ".pid"), "-0123456789")
}

// startSplit returns a function that starts `watershed split` with a placement.
func startSplit(placement string) func(dir, name, binary string) *server {
	return func(dir, name, binary string) *server { return startPlacement(placement, dir, name, binary) }
}

func startPlacement(placement, dir, name, binary string, flags ...string) *server {
	port := freePort()
	data := filepath.Join(dir, "w")
	args := []string{"split", "--data-dir", data, "--secure-port", fmt.Sprint(port), "--bind-address", "127.0.0.1"}
	if placement != "split" { // the baseline may have no placements
		args = append(args, "--placement", placement)
	}
	cmd, out := run(dir, placement, absolute(binary), append(args, flags...)...)
	waitFor(out, "Ready after")
	return &server{
		name:       name,
		url:        fmt.Sprintf("https://127.0.0.1:%d", port),
		kubeconfig: filepath.Join(data, "admin.kubeconfig"),
		client:     clientOf(filepath.Join(data, "admin.kubeconfig"), false),
		gzipClient: clientOf(filepath.Join(data, "admin.kubeconfig"), true),
		stop:       func() { kill(cmd) },
		dir:        data,
		etcd: func() clientv3.Config {
			config, err := harness.RegistryEtcd(data)
			check(err)
			return config
		},
		pids: func() map[int]string {
			all := map[int]string{}
			files, _ := filepath.Glob(filepath.Join(data, "*.pid"))
			for _, f := range files {
				name := serviceOf(filepath.Base(f))
				b, _ := os.ReadFile(f)
				if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && name != "etcd" {
					all[pid] = name
				}
			}
			return all
		},
	}
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
	}
}

func waitFor(path, text string) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(text)) {
			return
		}
	}
	b, _ := os.ReadFile(path)
	log.Fatalf("no %q in %s:\n%s", text, path, b)
}

func (s *server) ready() {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if resp, err := s.client.Get(s.url + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return
			}
		}
	}
	log.Fatalf("%s is not ready", s.name)
}

// clientOf returns an HTTP/2 client with a kubeconfig's certificate, with or without gzip.
func clientOf(kubeconfig string, gzip bool) *http.Client {
	b, err := os.ReadFile(kubeconfig)
	check(err)
	var c struct {
		Users []struct {
			User struct {
				Crt string `json:"client-certificate-data"`
				Key string `json:"client-key-data"`
			} `json:"user"`
		} `json:"users"`
	}
	check(yaml.Unmarshal(b, &c))
	crt, err := base64.StdEncoding.DecodeString(c.Users[0].User.Crt)
	check(err)
	key, err := base64.StdEncoding.DecodeString(c.Users[0].User.Key)
	check(err)
	pair, err := tls.X509KeyPair(crt, key)
	check(err)
	return &http.Client{Transport: &http.Transport{
		ForceAttemptHTTP2:  true,
		DisableCompression: !gzip,
		TLSClientConfig:    &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}},
	}}
}

func freePort() int {
	port, err := porttest.UnusedPort()
	check(err)
	return port
}

// peak samples the memory until the caller calls the returned function, which returns the maximum in
// megabytes.
func (s *server) peak() func() float64 {
	highest, stop, done := s.memory(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				highest = max(highest, s.memory())
			}
		}
	}()
	var once sync.Once
	return func() float64 {
		once.Do(func() { close(stop) })
		<-done
		return highest
	}
}

// rest returns a client-go configuration without a transport, which the caller sets.
func (s *server) rest() *rest.Config {
	return &rest.Config{
		Host:          s.url,
		QPS:           -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf"},
	}
}

func (s *server) do(method, path, accept string, body []byte, want int) []byte {
	return s.doBy(s.client, method, path, accept, body, want)
}

func (s *server) doBy(client *http.Client, method, path, accept string, body []byte, want int) []byte {
	for try := 0; ; try++ {
		req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
		check(err)
		if accept != "" {
			req.Header.Set("Accept", accept)
		}
		req.Header.Set("Content-Type", "application/json")
		if method == http.MethodPatch {
			req.Header.Set("Content-Type", "application/merge-patch+json")
		}
		req.Header.Set("User-Agent", "bench")
		resp, err := client.Do(req)
		check(err)
		data, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		check(err)
		if resp.StatusCode == want {
			return data
		}
		// A new namespace is forbidden until each process has read it. client-go too repeats a request if the response
		// has Retry-After.
		again := resp.StatusCode == http.StatusForbidden || resp.Header.Get("Retry-After") != ""
		if try > 20 || !again {
			log.Fatalf("%s %s %s: %s: %.300s", s.name, method, path, resp.Status, data)
		}
		log.Printf("%s: %s %s is sent again: %s", s.name, method, path, resp.Status)
		time.Sleep(200 * time.Millisecond)
	}
}

// status sends a request and returns the status code.
func (s *server) status(method, path string) int {
	req, err := http.NewRequest(method, s.url+path, nil)
	check(err)
	resp, err := s.client.Do(req)
	check(err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	check(err)
	return resp.StatusCode
}

// openWatch opens a watch. It returns an error if the server refuses it or cannot be reached.
func (s *server) openWatch(ctx context.Context, client *http.Client, path, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	check(err)
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		reason, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return nil, fmt.Errorf("%s: %s", resp.Status, reason)
	}
	return resp, nil
}

// resourceVersion returns the resourceVersion of an object or a list.
func resourceVersion(body []byte) string {
	var o struct {
		Metadata struct{ ResourceVersion string }
	}
	check(json.Unmarshal(body, &o))
	return o.Metadata.ResourceVersion
}
