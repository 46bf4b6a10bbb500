package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// startCluster writes the configuration of `split`, puts a proxy between every two processes, and starts all processes.
// For the placements hosts and mixed, it keeps only etcd and the PKI of `split`.
func startCluster(ctx context.Context, o options) (*cluster, error) {
	c := &cluster{dir: o.dir, watershed: o.watershed, older: o.older, mayDelete: o.mayDelete}
	var err error
	if c.port, err = porttest.UnusedPort(); err != nil { // a proxy would take a port of the system's choice
		return nil, err
	}
	if err := c.plan(ctx, o); err != nil {
		return nil, err
	}
	configs, owner, err := c.readConfigs(o)
	if err != nil {
		return nil, err
	}
	if o.onHosts() {
		if err := c.addHosts(o, configs); err != nil {
			return nil, err
		}
	}
	for name, conf := range configs {
		if err := c.throughLinks(name, conf, owner); err != nil {
			return nil, err
		}
		p, err := c.newProcess(o, name, conf)
		if err != nil {
			return nil, err
		}
		c.processes = append(c.processes, p)
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

// plan lets `split` write the configuration of every process.
func (c *cluster) plan(ctx context.Context, o options) error {
	placement := o.placement
	if o.onHosts() {
		placement = "split"
	}
	// The older release may not know flags of the newer.
	plan := exec.CommandContext(ctx, cmp.Or(o.older, o.watershed), "split", "--dry-run", "--data-dir", o.dir,
		"--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(c.port), "--placement", placement,
		"--replicas", o.replicas, "--rpc-network", "tcp") // faults cut TCP links
	if out, err := plan.CombinedOutput(); err != nil {
		return fmt.Errorf("plan: %w\n%s", err, out)
	}
	return nil
}

// readConfigs returns the configurations by process, and the process of each address.
func (c *cluster) readConfigs(o options) (configs map[string]map[string]any, owner map[string]string, err error) {
	files, err := filepath.Glob(filepath.Join(o.dir, "config", "*.yaml"))
	if err != nil {
		return nil, nil, err
	}
	configs, owner = map[string]map[string]any{}, map[string]string{}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".yaml")
		if strings.HasPrefix(name, "xds-") {
			continue // it would publish addresses that bypass the links
		}
		if o.onHosts() && !strings.HasPrefix(name, "etcd-") {
			continue
		}
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, nil, err
		}
		conf := map[string]any{}
		if err := yaml.Unmarshal(b, &conf); err != nil {
			return nil, nil, err
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
	return configs, owner, nil
}

// addHosts adds the configurations of the API servers of hosts and mixed.
func (c *cluster) addHosts(o options, configs map[string]map[string]any) (err error) {
	for n := range hostCount {
		if o.placement == mixed && n == hostCount-1 {
			configs[reference] = c.reference(filepath.Join(o.dir, reference), n)
			break
		}
		name := fmt.Sprintf("host-%d", n)
		if configs[name], err = c.host(filepath.Join(o.dir, name), n); err != nil {
			return err
		}
	}
	return nil
}

// throughLinks replaces the addresses of other processes in a configuration with proxies.
func (c *cluster) throughLinks(name string, conf map[string]any, owner map[string]string) error {
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
				return err
			}
			c.links = append(c.links, &link{from: name, to: owner[address], proxy: p})
			if a = p.address(); scheme != "" {
				a = scheme + "://" + a
			}
			through = append(through, a)
		}
		conf[key] = strings.Join(through, ",")
	}
	return nil
}

// newProcess returns the process of a configuration, and writes the configuration with the settings of its targets.
func (c *cluster) newProcess(o options, name string, conf map[string]any) (*process, error) {
	if name == reference {
		return &process{name: name, program: harness.Peer(name), args: flagsOf(conf), cluster: c}, nil
	}
	command, _, _ := strings.Cut(name, "-")
	data, _ := conf["data-dir"].(string)
	peer, _ := conf["listen-peer-urls"].(string)
	targets, _ := conf["target"].([]any)
	if len(targets) > 0 && !o.onHosts() {
		command = "run"
	}
	if command == "host" {
		command, data = "up", filepath.Join(data, "nats")
		targets = []any{"watchfanout", "gateway", "registry"}
	}
	for _, target := range targets {
		switch target {
		case "watchfanout":
			conf["watch-progress-period"] = "1s"
			conf["watch-ring-bytes"] = "65536" // resumes from older revisions are replayed from the log
		case "gateway":
			conf["watch-bookmark-period"] = "2s"
		case "registry":
			conf["etcd-compaction-interval"] = "0s" // the fault compact does
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
	return &process{
		name:    name,
		program: c.watershed,
		args:    []string{command, "--config", path},
		data:    data,
		peer:    peer,
		cluster: c,
	}, nil
}
