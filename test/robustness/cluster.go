package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"sigs.k8s.io/yaml"

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
	// corrupt writes undecodable or unusual objects.
	corrupt func(n int)
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

// startCluster writes the configuration of `split`, puts a proxy between every two processes, and starts all processes.
// For the placements hosts and mixed, it keeps only etcd and the PKI of `split`.
func startCluster(ctx context.Context, o options) (*cluster, error) {
	c := &cluster{dir: o.dir, watershed: o.watershed, older: o.older}
	port, err := harness.UnusedPort() // a proxy would take a port of the system's choice
	if err != nil {
		return nil, err
	}
	c.port = port
	placement := o.placement
	if o.onHosts() {
		placement = "split"
	}
	// The older release may not know flags of the newer.
	plan := exec.CommandContext(ctx, cmp.Or(o.older, o.watershed), "split", "--dry-run", "--data-dir", o.dir,
		"--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(c.port), "--placement", placement,
		"--replicas", o.replicas, "--rpc-network", "tcp") // faults cut TCP links
	if out, err := plan.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("plan: %w\n%s", err, out)
	}
	files, err := filepath.Glob(filepath.Join(o.dir, "config", "*.yaml"))
	if err != nil {
		return nil, err
	}
	owner := map[string]string{} // address → process
	configs := map[string]map[string]any{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		conf := map[string]any{}
		if err := yaml.Unmarshal(b, &conf); err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(filepath.Base(f), ".yaml")
		if strings.HasPrefix(name, "xds-") {
			continue // it would publish addresses that bypass the links
		}
		if o.onHosts() && !strings.HasPrefix(name, "etcd-") {
			continue
		}
		delete(conf, "xds-servers")
		if conf["cluster-routes"] != nil && o.older == "" { // the older release may not have the flag
			// NATS servers advertise addresses, which would bypass the links. This address accepts no connection.
			conf["cluster-advertise"] = "127.0.0.1:1"
		}
		configs[name] = conf
		for _, key := range []string{"rpc-address", "listen-address", "listen-client-urls", "cluster-listen-address"} {
			if a, ok := conf[key].(string); ok {
				owner[strings.TrimPrefix(a, "https://")] = name
				if strings.HasPrefix(name, "etcd-") {
					c.etcd = append(c.etcd, a)
				}
			}
		}
	}
	if o.onHosts() {
		for n := range hostCount {
			if o.placement == mixed && n == hostCount-1 {
				configs[reference] = c.reference(filepath.Join(o.dir, reference), n)
				break
			}
			name := fmt.Sprintf("host-%d", n)
			if configs[name], err = c.host(filepath.Join(o.dir, name), n); err != nil {
				return nil, err
			}
		}
	}
	for name, conf := range configs {
		for key, v := range conf {
			s, ok := v.(string)
			if !ok || !strings.HasSuffix(key, "-addresses") &&
				!slices.Contains([]string{"etcd-servers", "nats-url", "cluster-routes"}, key) {
				continue
			}
			var through []string
			for _, a := range strings.Split(s, ",") {
				scheme, address, ok := strings.Cut(a, "://")
				if !ok {
					scheme, address = "", a
				}
				if owner[address] == name {
					continue // --cluster-routes has the server's own address
				}
				p, err := newProxy(address)
				if err != nil {
					return nil, err
				}
				c.links = append(c.links, &link{from: name, to: owner[address], proxy: p})
				if a = p.address(); scheme != "" {
					a = scheme + "://" + a
				}
				through = append(through, a)
			}
			conf[key] = strings.Join(through, ",")
		}
		if name == reference {
			c.processes = append(c.processes, &process{
				name: name, program: harness.Peer(name), args: flagsOf(conf), cluster: c})
			continue
		}
		command, _, _ := strings.Cut(name, "-")
		data, _ := conf["data-dir"].(string)
		peer, _ := conf["listen-peer-urls"].(string)
		targets, _ := conf["target"].([]any)
		if command == "host" {
			command, data = "up", filepath.Join(data, "nats")
			targets = []any{"watchfanout", "gateway", "registry"}
		}
		for _, target := range targets {
			if !o.onHosts() {
				command = "run"
			}
			switch target {
			case "watchfanout":
				conf["watch-progress-period"] = "1s"
				conf["watch-ring-bytes"] = "65536" // resumes from older revisions are replayed from the log
			case "gateway":
				conf["watch-bookmark-period"] = "2s"
			case "registry":
				conf["etcd-compaction-interval"] = "0s" // faults compact
			}
		}
		b, err := yaml.Marshal(conf)
		if err != nil {
			return nil, err
		}
		path := filepath.Join(o.dir, "config", name+".yaml")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return nil, err
		}
		c.processes = append(c.processes, &process{
			name:    name,
			program: c.watershed,
			args:    []string{command, "--config", path},
			data:    data,
			peer:    peer,
			cluster: c,
		})
	}
	if o.placement == mixed {
		c.processes = append(c.processes, c.controllers())
	}
	slices.SortFunc(c.processes, func(a, b *process) int { return strings.Compare(a.name, b.name) })
	slices.SortFunc(c.links, func(a, b *link) int { return strings.Compare(a.from+a.to, b.from+b.to) })
	for _, p := range c.processes {
		p.start()
	}
	return c, c.ready(ctx)
}

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
	deadline := time.Now().Add(time.Minute)
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

// differences returns the log lines of the replicas whose objects differed from etcd's (platform/watchcache/logreader).
func (c *cluster) differences() (lines []string) {
	for _, p := range c.processes {
		data, err := os.ReadFile(filepath.Join(c.dir, p.name+".log"))
		if err != nil {
			lines = append(lines, err.Error())
		}
		for line := range strings.Lines(string(data)) {
			if strings.Contains(line, "Objects differ from") {
				lines = append(lines, p.name+": "+line)
			}
		}
	}
	return lines
}

func (c *cluster) died() (n int) {
	for _, p := range c.processes {
		n += p.ends()
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
