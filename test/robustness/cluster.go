package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// link is a connection from a process to another process's address, through a proxy that faults can cut.
type link struct {
	from, to string
	*proxy
}

type cluster struct {
	dir, watershed string
	port           int
	processes      []*process
	links          []*link
	etcd           []string
	// corrupt writes undecodable or unusual objects.
	corrupt func(n int)
}

// hosts is the placement of several `up` on the same etcd, which share the port of the clients.
const hosts = "hosts"

// hostCount is the number of hosts.
const hostCount = 3

// startCluster writes the configuration of `split`, puts a proxy between every two processes, and starts all processes.
// For the placement hosts, it keeps only etcd and the PKI of `split`.
func startCluster(ctx context.Context, o options) (*cluster, error) {
	c := &cluster{dir: o.dir, watershed: o.watershed}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	placement := o.placement
	if placement == hosts {
		placement = "split"
	}
	plan := exec.CommandContext(ctx, o.watershed, "split", "--dry-run", "--data-dir", o.dir, "--bind-address",
		"127.0.0.1", "--secure-port", fmt.Sprint(c.port), "--placement", placement, "--replicas", o.replicas,
		"--rpc-network", "tcp") // faults cut TCP links
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
		if o.placement == hosts && !strings.HasPrefix(name, "etcd-") {
			continue
		}
		delete(conf, "xds-servers")
		configs[name] = conf
		for _, key := range []string{"rpc-address", "listen-address", "listen-client-urls"} {
			if a, ok := conf[key].(string); ok {
				owner[strings.TrimPrefix(a, "https://")] = name
				if strings.HasPrefix(name, "etcd-") {
					c.etcd = append(c.etcd, a)
				}
			}
		}
	}
	if o.placement == hosts {
		for n := range hostCount {
			name := fmt.Sprintf("host-%d", n)
			if configs[name], err = c.host(filepath.Join(o.dir, name), n); err != nil {
				return nil, err
			}
		}
	}
	for name, conf := range configs {
		for key, v := range conf {
			s, ok := v.(string)
			if !ok || !strings.HasSuffix(key, "-addresses") && key != "etcd-servers" && key != "nats-url" {
				continue
			}
			var through []string
			for _, a := range strings.Split(s, ",") {
				scheme, address, ok := strings.Cut(a, "://")
				if !ok {
					scheme, address = "", a
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
		command, _, _ := strings.Cut(name, "-")
		data, _ := conf["data-dir"].(string)
		targets, _ := conf["target"].([]any)
		if command == "host" {
			command, data = "up", filepath.Join(data, "nats")
			targets = []any{"watchfanout", "gateway", "registry"}
		}
		for _, target := range targets {
			if o.placement != hosts {
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
			command: command,
			config:  path,
			data:    data,
			cluster: c,
		})
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
	identity := filepath.Join(c.dir, "pki", "inner-registry")
	return map[string]any{
		"data-dir":            dir,
		"bind-address":        "127.0.0.1",
		"secure-port":         c.port,
		"permit-port-sharing": true,
		"advertise-address":   fmt.Sprintf("192.0.2.%d", n+1),
		"etcd-servers":        strings.Join(c.etcd, ","),
		"etcd-cafile":         filepath.Join(c.dir, "pki", "inner-ca.crt"),
		"etcd-certfile":       identity + ".crt",
		"etcd-keyfile":        identity + ".key",
	}, nil
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

func (c *cluster) died() (n int) {
	for _, p := range c.processes {
		n += p.unexpectedEnds
	}
	return n
}
