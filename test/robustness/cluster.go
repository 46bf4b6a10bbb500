package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"watershed.dev/test/harness"
)

// link is a connection from a process to another process's address, through a proxy that faults can cut.
type link struct {
	from, to string
	*proxy
}

type cluster struct {
	dir, watershed, older string

	port      int
	processes []*process
	links     []*link
	etcd      []string
	// workload is nil until the clients start.
	workload *workload
	// mayDelete: the harness may delete messages of the log (loseMessage).
	mayDelete bool
	// begun are the times at which the faults began.
	begun []time.Time
	// replacing is held while a member of etcd is replaced.
	replacing sync.Mutex
}

// The placements of several API servers on the same etcd, which share the port of the clients.
const (
	// hosts is three `up`.
	hosts = "hosts"
	// mixed is two `up` and a kube-apiserver, with kube-controller-manager as a client.
	mixed = "mixed"
)

// hostCount is the number of API servers of hosts and mixed.
const hostCount = 3

// Processes of the placement mixed.
const (
	reference   = "kube-apiserver"
	controllers = "kube-controller-manager"
)

// onHosts returns true if each API server is a process.
func (o *options) onHosts() bool { return o.placement == hosts || o.placement == mixed }

// host returns the configuration of `up` on host n, with its data in dir.
func (c *cluster) host(dir string, n int) (map[string]any, error) {
	if err := os.CopyFS(filepath.Join(dir, "pki"), os.DirFS(filepath.Join(c.dir, "pki"))); err != nil {
		return nil, err
	}
	conf := c.shared(n)
	conf["data-dir"] = dir
	return conf, nil
}

// shared returns the settings of host n that `up` and kube-apiserver have.
func (c *cluster) shared(n int) map[string]any {
	return map[string]any{
		"bind-address":        "127.0.0.1",
		"secure-port":         c.port,
		"permit-port-sharing": true,
		"advertise-address":   fmt.Sprintf("192.0.2.%d", n+1),
		"etcd-servers":        strings.Join(c.etcd, ","),
		"etcd-cafile":         c.pki("inner-ca.crt"),
		"etcd-certfile":       c.pki("inner-registry.crt"),
		"etcd-keyfile":        c.pki("inner-registry.key"),
	}
}

// pki returns the path of a certificate or a key of the control plane.
func (c *cluster) pki(name string) string { return filepath.Join(c.dir, "pki", name) }

// reference returns the flags of kube-apiserver as host n, with the certificates and keys of the other hosts.
func (c *cluster) reference(dir string, n int) map[string]any {
	conf := c.shared(n)
	maps.Copy(conf, map[string]any{
		"cert-dir":                           dir,
		"allow-privileged":                   true,
		"authorization-mode":                 "Node,RBAC",
		"enable-admission-plugins":           "NodeRestriction",
		"enable-bootstrap-token-auth":        true,
		"service-cluster-ip-range":           "10.96.0.0/16",
		"etcd-compaction-interval":           "0s",
		"client-ca-file":                     c.pki("ca.crt"),
		"tls-cert-file":                      c.pki("apiserver.crt"),
		"tls-private-key-file":               c.pki("apiserver.key"),
		"service-account-issuer":             "https://kubernetes.default.svc.cluster.local",
		"service-account-key-file":           c.pki("sa.pub"),
		"service-account-signing-key-file":   c.pki("sa.key"),
		"proxy-client-cert-file":             c.pki("front-proxy-client.crt"),
		"proxy-client-key-file":              c.pki("front-proxy-client.key"),
		"requestheader-client-ca-file":       c.pki("front-proxy-ca.crt"),
		"requestheader-allowed-names":        "front-proxy-client",
		"requestheader-username-headers":     "X-Remote-User",
		"requestheader-group-headers":        "X-Remote-Group",
		"requestheader-extra-headers-prefix": "X-Remote-Extra-",
	})
	return conf
}

// flagsOf returns a configuration as flags.
func flagsOf(conf map[string]any) (flags []string) {
	for key, v := range conf {
		flags = append(flags, fmt.Sprintf("--%s=%v", key, v))
	}
	return flags
}

// controllers returns kube-controller-manager as a client of all API servers.
func (c *cluster) controllers() *process {
	return &process{name: controllers, program: harness.Peer(controllers), cluster: c, args: []string{
		"--kubeconfig=" + filepath.Join(c.dir, "admin.kubeconfig"), "--leader-elect=false", "--secure-port=0",
		"--use-service-account-credentials", "--service-account-private-key-file=" + c.pki("sa.key"),
		"--root-ca-file=" + c.pki("ca.crt"),
		// It creates a ConfigMap in each namespace.
		"--controllers=*,-root-ca-certificate-publisher-controller"}}
}

// etcdClient returns a client of all members of etcd, with registry's certificate.
func (c *cluster) etcdClient() (*clientv3.Client, error) {
	conf, err := harness.RegistryEtcd(c.dir)
	if err != nil {
		return nil, err
	}
	conf.Endpoints, conf.Logger = c.etcd, zap.NewNop() // no links between
	conf.DialKeepAliveTime, conf.DialKeepAliveTimeout = 5*time.Second, 5*time.Second
	return clientv3.New(conf)
}

func (c *cluster) url() string { return fmt.Sprintf("https://127.0.0.1:%d", c.port) }

func (c *cluster) ready(ctx context.Context) error {
	client := &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
	}
	deadline := time.Now().Add(harness.Soon)
	for {
		resp, err := client.Get(c.url() + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("%s", resp.Status)
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			c.stop()
			return fmt.Errorf("the cluster does not become ready: %w; logs in %s", err, c.dir)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (c *cluster) stop() {
	for _, p := range c.processes {
		p.stop()
	}
	for _, l := range c.links {
		l.close()
	}
}

// logged returns the lines of all processes' logs that contain text.
func (c *cluster) logged(text string) (lines []string) {
	for _, p := range c.processes {
		// `up` writes its log to its --data-dir, and rotates it.
		logs, _ := filepath.Glob(filepath.Join(c.dir, p.name, "watershed*.log"))
		for _, path := range append(logs, p.log()) {
			data, err := os.ReadFile(path)
			if err != nil {
				lines = append(lines, err.Error())
			}
			for line := range strings.Lines(string(data)) {
				if strings.Contains(line, text) {
					lines = append(lines, p.name+": "+line)
				}
			}
		}
	}
	return lines
}

func (c *cluster) died() (n int) {
	for _, p := range c.processes {
		n += len(p.ends())
	}
	return n
}

// changed returns the number of changes between restarts that have succeeded (process.changes).
func (c *cluster) changed() (n int) {
	for _, p := range c.processes {
		n += p.made()
	}
	return n
}
