package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// sender is the user that a request authenticates as.
type sender string

const (
	// anonymous has no credentials.
	anonymous sender = ""
	// tenant is a service account with all rights in the namespace "tenant".
	tenant sender = "tenant"
	// admin is a service account bound to cluster-admin. Flow control limits it, unlike system:masters.
	admin sender = "admin"
)

// namespace is the tenant's namespace.
const namespace = "tenant"

// subject is a running server under measurement.
type subject struct {
	t      testing.TB
	form   string
	server *harness.Server
	etcd   *harness.Member
	tokens map[sender]string
	// pids are the process IDs of the measured processes by name, without etcd.
	pids map[string]int
	// masters is a client in system:masters that opens a connection for each request.
	masters *http.Client
	// fresh is the anonymous memory after the start, in bytes. idle is the CPU time of an idle second.
	fresh int64
	idle  time.Duration
}

// start starts a server of a form on an empty etcd, and waits until it is idle. idle is the CPU time of an idle second,
// or zero if it is not yet measured.
func start(t testing.TB, form string, idle time.Duration) *subject {
	t.Helper()
	s := &subject{t: t, form: form, idle: idle, tokens: map[sender]string{}, pids: map[string]int{}}
	switch form {
	case kubeAPIServer:
		dir := harness.TempDir(t)
		s.etcd = harness.NewMember(t, dir)
		s.server = harness.KubeAPIServer(t, dir, s.etcd.URL).Server
	case "up":
		dir := harness.TempDir(t)
		s.etcd = harness.NewMember(t, dir)
		s.server = harness.Up(t, dir, "--etcd-servers="+s.etcd.URL)
	case "split":
		s.server = harness.Split(t, "")
	default:
		t.Fatalf("there is no form %q", form)
	}
	s.findProcesses()
	s.masters = s.newMasters()
	s.prepare()
	s.settle()
	return s
}

// stop kills the server and removes its files.
func (s *subject) stop() {
	s.server.Kill()
	if s.etcd != nil {
		s.etcd.Stop()
	}
	os.RemoveAll(s.server.Dir)
}

func (s *subject) findProcesses() {
	if s.form != "split" {
		s.pids[s.form] = s.server.PID()
		return
	}
	files, _ := filepath.Glob(filepath.Join(s.server.Dir, "*.pid"))
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".pid")
		b, _ := os.ReadFile(f)
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && !strings.HasPrefix(name, "etcd") {
			s.pids[name] = pid
		}
	}
}

func (s *subject) newMasters() *http.Client {
	conf, err := rest.TLSConfigFor(s.server.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	conf.InsecureSkipVerify, conf.RootCAs = true, nil
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{TLSClientConfig: conf,
		DisableKeepAlives: true}}
}

// prepare creates the tenant's namespace and the credentials.
func (s *subject) prepare() {
	s.t.Helper()
	manifest := `
apiVersion: v1
kind: Namespace
metadata: {name: tenant}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: tenant}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: tenant, namespace: tenant}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: admin, namespace: tenant}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: all, namespace: tenant}
rules: [{apiGroups: ["*"], resources: ["*"], verbs: ["*"]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: all, namespace: tenant}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: all}
subjects: [{kind: ServiceAccount, name: tenant, namespace: tenant}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: cost-admin}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: admin, namespace: tenant}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: mine, namespace: tenant}
data: {a: x}
`
	harness.Eventually(s.t, harness.Soon, func() error {
		if out, err := s.server.TryKubectl(manifest, "apply", "-f", "-"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	hour := int64(3600)
	for _, w := range []sender{tenant, admin} {
		harness.Write(s.t, func() error {
			r, err := s.server.Client().CoreV1().ServiceAccounts(namespace).CreateToken(s.t.Context(), string(w),
				&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &hour}},
				metav1.CreateOptions{})
			if err == nil {
				s.tokens[w] = r.Status.Token
			}
			return err
		})
	}
	s.age()
}

// age writes 15 MB of large events, so that the server's in-memory event history reaches its full size.
func (s *subject) age() {
	s.t.Helper()
	ctx, client := s.t.Context(), s.server.Client().CoreV1().ConfigMaps(namespace)
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "history"}}
	harness.Write(s.t, func() error {
		_, err := client.Create(ctx, o, metav1.CreateOptions{})
		return err
	})
	for i := range 15 {
		o.Data = map[string]string{"a": strings.Repeat(string(rune('a'+i)), 1_000_000)}
		harness.Write(s.t, func() error { // without a resourceVersion, so that a repetition has no conflict
			_, err := client.Update(ctx, o, metav1.UpdateOptions{})
			return err
		})
	}
	harness.Write(s.t, func() error {
		if err := client.Delete(ctx, "history", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	})
}

// settle waits until the server is idle. It records the server's memory and, if not yet measured, its idle CPU time.
func (s *subject) settle() {
	s.quiet(10 * time.Second)
	s.steady(5 * time.Second)
	if s.idle == 0 {
		const span = 3 * time.Second
		before, began := s.usage().cpu, time.Now()
		time.Sleep(span)
		s.idle = max(1, time.Duration(float64(s.usage().cpu-before)/time.Since(began).Seconds()))
	}
	_, _ = s.heap()
	s.fresh = s.usage().anon
}

// steady waits, at most within, until the number of goroutines is stable for half a second. Start-up goroutines have
// ended then.
func (s *subject) steady(within time.Duration) {
	last := int64(-1)
	for deadline := time.Now().Add(within); time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
		n, err := s.goroutines()
		if err != nil || n == last {
			return
		}
		last = n
	}
}

// quiet waits, at most within, until the server uses less than a tenth of a CPU in two consecutive spans. One span is
// not enough, because other work may keep the server off the CPU.
func (s *subject) quiet(within time.Duration) {
	const span = 250 * time.Millisecond
	for still, deadline := 0, time.Now().Add(within); still < 2 && time.Now().Before(deadline); {
		before := s.usage().cpu
		time.Sleep(span)
		if s.usage().cpu-before <= span/10+10*time.Millisecond {
			still++
		} else {
			still = 0
		}
	}
}

// pages returns the base URLs of the server's profiles, each with its client.
func (s *subject) pages() map[string]*http.Client {
	if s.form == kubeAPIServer {
		return map[string]*http.Client{s.server.Config().Host: s.masters}
	}
	pages := map[string]*http.Client{}
	for name := range s.pids {
		socket := filepath.Join(s.server.Dir, name+".sock")
		if s.form == "up" {
			socket = filepath.Join(s.server.Dir, "debug.sock")
		}
		if strings.HasPrefix(name, "nats") { // NATS serves no profiles
			continue
		}
		pages["http://"+name] = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			},
		}}
	}
	return pages
}

// sum returns the sum of a number that a pattern finds in a profile of each process.
func (s *subject) sum(path string, number *regexp.Regexp) (total int64, err error) {
	for base, c := range s.pages() {
		resp, err := c.Get(base + path)
		if err != nil {
			return 0, err
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return 0, err
		}
		m := number.FindSubmatch(text)
		if m == nil {
			return 0, fmt.Errorf("%s%s: %s", base, path, resp.Status)
		}
		n, err := strconv.ParseInt(string(m[1]), 10, 64)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

var (
	heapAlloc  = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)
	goroutines = regexp.MustCompile(`^goroutine profile: total (\d+)`)
)

// heap returns the bytes of the live heap. It collects twice, because sync.Pool keeps values over one collection.
func (s *subject) heap() (bytes int64, err error) {
	for range 2 {
		if bytes, err = s.sum("/debug/pprof/heap?gc=1&debug=1", heapAlloc); err != nil {
			return 0, err
		}
	}
	return bytes, nil
}

func (s *subject) goroutines() (int64, error) {
	return s.sum("/debug/pprof/goroutine?debug=1", goroutines)
}

// logged returns the size of the server's logs in bytes.
func (s *subject) logged() (bytes int64) {
	files, _ := filepath.Glob(filepath.Join(s.server.Dir, "*.log"))
	for _, f := range files {
		if info, err := os.Stat(f); err == nil && !strings.HasPrefix(filepath.Base(f), "etcd") {
			bytes += info.Size()
		}
	}
	return bytes
}

// died returns true if a process of the server has ended.
func (s *subject) died() bool {
	for _, pid := range s.pids {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/stat", pid)); err != nil {
			return true
		}
	}
	return false
}

// address returns the host and port of the server's API.
func (s *subject) address() string { return fmt.Sprintf("127.0.0.1:%d", s.server.Port) }

// tls returns a client configuration for an ALPN protocol, without a client certificate.
func (s *subject) tls(protocol string) *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}}
}

// profile writes the heap and goroutine profiles of every process to a directory.
func (s *subject) profile(dir string, sh *shape) error {
	dir = filepath.Join(dir, strings.Map(func(r rune) rune {
		if strings.ContainsRune(" :,'/", r) {
			return '-'
		}
		return r
	}, s.form+" "+sh.String()))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for base, c := range s.pages() {
		for name, path := range map[string]string{"heap.pb.gz": "heap?gc=1", "goroutines.txt": "goroutine?debug=1"} {
			resp, err := c.Get(base + "/debug/pprof/" + path)
			if err != nil {
				return err
			}
			content, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil {
				process := base[strings.LastIndexByte(base, '/')+1:]
				err = os.WriteFile(filepath.Join(dir, process+"-"+name), content, 0o644)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
