package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"

	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// plan chooses addresses and writes the configuration of each process.
func (s *splitRun) plan() ([]*child, error) {
	ports, err := freePorts(3 * total(s.counts))
	if err != nil {
		return nil, err
	}
	nextAddress := func() string {
		p := ports[0]
		ports = ports[1:]
		return fmt.Sprintf("127.0.0.1:%d", p)
	}
	addresses := map[string][]string{}
	for name, n := range s.counts {
		for range n {
			if m := moduleOf(name); m == nil || m.ServesRPC {
				addresses[name] = append(addresses[name], s.rpcAddress(name, len(addresses[name]), nextAddress()))
			}
		}
	}
	var all []*child
	add := func(command string, n int, debug string, settings map[string]any) error {
		p, err := s.planProcess(command, n, debug, settings)
		all = append(all, p)
		return err
	}
	s.addresses = addresses
	if err := s.planStores(addresses, nextAddress, add); err != nil {
		return nil, err
	}
	for n := range s.counts["xds"] {
		debug := s.debugSocket("xds", n)
		if err := add("xds", n, debug, merge(s.identitySettings("xds"), s.fromCommandLine["xds"], map[string]any{
			"rpc-address":   addresses["xds"][n],
			"debug-address": debug,
			"replicas-file": s.replicasFile(),
			"state-file":    filepath.Join(s.dir, "xds", fmt.Sprintf("state-%d.json", n)),
		})); err != nil {
			return nil, err
		}
	}
	for _, m := range modules {
		for n := range s.counts[m.Name] {
			address := ""
			if m.ServesRPC {
				address = addresses[m.Name][n]
			}
			p, err := s.planService(m, n, address)
			if err != nil {
				return nil, err
			}
			all = append(all, p)
		}
	}
	return all, s.writeReplicas()
}

// planProcess returns a process and writes its configuration.
func (s *splitRun) planProcess(command string, n int, debug string, settings map[string]any) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &child{
		name:    fmt.Sprintf("%s-%d", command, n),
		dir:     s.dir,
		program: self,
		logs:    s.logs,
		command: command,
		debug:   debug,
	}
	p.config = filepath.Join(s.dir, "config", p.name+".yaml")
	p.args = []string{command, "--config", p.config}
	if err := os.MkdirAll(filepath.Dir(p.config), 0o700); err != nil {
		return nil, err
	}
	return p, writeYAML(p.config, settings)
}

// planService returns the n-th process of a service, which listens on address.
func (s *splitRun) planService(m *process.Module, n int, address string) (*child, error) {
	debug := s.debugSocket(m.Name, n)
	settings := merge(s.serviceSettings(m, s.addresses), map[string]any{"debug-address": debug})
	if m.ServesRPC {
		settings["rpc-address"] = address
	}
	if path, ok := settings[auditLogPath].(string); ok {
		settings[auditLogPath] = perProcessPath(path, n)
	}
	if len(m.DependsOn) > 0 {
		settings["xds-servers"] = strings.Join(s.addresses["xds"], ",")
		settings["xds-cache-dir"] = filepath.Join(s.dir, "xds", fmt.Sprintf("%s-%d", m.Name, n))
	}
	return s.planProcess(m.Name, n, debug, settings)
}

const auditLogPath = "audit-log-path"

// perProcessPath returns the n-th gateway's audit log, such as audit-1.log beside audit.log. Two processes cannot
// rotate the same file.
func perProcessPath(path string, n int) string {
	if n == 0 || path == "-" {
		return path
	}
	ext := filepath.Ext(path)
	return fmt.Sprintf("%s-%d%s", strings.TrimSuffix(path, ext), n, ext)
}

func (s *splitRun) debugSocket(name string, n int) string {
	return filepath.Join(s.sockets, fmt.Sprintf("%s-%d.sock", name, n))
}

// rpcAddress returns the RPC address of the n-th process of a service, by --rpc-network. etcd and NATS always use
// host:port.
func (s *splitRun) rpcAddress(name string, n int, hostPort string) string {
	if s.network == "tcp" || name == "etcd" || name == "nats" {
		return hostPort
	}
	return rpc.Address{Path: filepath.Join(s.sockets, fmt.Sprintf("%s-%d.rpc", name, n))}.String()
}

// replicasFile returns the path of the xDS server's replicas file.
func (s *splitRun) replicasFile() string { return filepath.Join(s.dir, "xds", "replicas.yaml") }

// writeReplicas writes the addresses of every service to the replicas file.
func (s *splitRun) writeReplicas() error {
	all := map[string]any{}
	for _, m := range modules {
		if m.ServesRPC {
			all[m.Name] = s.addresses[m.Name]
		}
	}
	if err := os.MkdirAll(filepath.Dir(s.replicasFile()), 0o700); err != nil {
		return err
	}
	return writeYAML(s.replicasFile(), all)
}

// serviceSettings returns the common settings of a service's processes.
func (s *splitRun) serviceSettings(m *process.Module, addresses map[string][]string) map[string]any {
	fromCommandLine := func(flag string) any {
		for _, flags := range s.fromCommandLine {
			if v := flags[flag]; v != nil {
				return v
			}
		}
		return nil
	}
	settings := merge(s.settingsFor(m.Name, fromCommandLine), s.identitySettings(m.Name), s.fromCommandLine[m.Name])
	for _, peer := range m.DependsOn {
		settings[peer+"-addresses"] = strings.Join(addresses[peer], ",")
	}
	switch m.Name {
	case "gateway":
		settings["permit-port-sharing"], settings["bind-address"] = true, s.bind
	case "registry":
		id := s.pki.Identity("registry")
		settings["etcd-servers"] = urls("https", addresses["etcd"])
		settings["nats-url"] = urls("tls", addresses["nats"])
		settings["log-replicas"] = s.counts["nats"]
		settings["etcd-certfile"], settings["etcd-keyfile"] = id.CertFile, id.KeyFile
		settings["etcd-cafile"] = id.CAFile
	case "watchfanout":
		settings["nats-url"] = urls("tls", addresses["nats"])
	}
	return settings
}

// planStores configures the members of etcd and the servers of NATS, as single processes or as clusters.
func (s *splitRun) planStores(addresses map[string][]string, nextAddress func() string,
	add func(string, int, string, map[string]any) error) error {
	peers := func(name string) (own []string) {
		for range s.counts[name] {
			own = append(own, nextAddress())
		}
		return own
	}
	members, routes := peers("etcd"), peers("nats")
	var initial []string
	for n, m := range members {
		initial = append(initial, fmt.Sprintf("etcd-%d=https://%s", n, m))
	}
	for n, address := range addresses["etcd"] {
		metrics, dir := "http://"+nextAddress(), "etcd"
		settings := map[string]any{"listen-client-urls": "https://" + address, "listen-metrics-urls": metrics}
		if len(members) > 1 {
			dir = fmt.Sprintf("etcd-%d", n)
			settings = merge(settings, map[string]any{
				"name":             dir,
				"listen-peer-urls": "https://" + members[n],
				"initial-cluster":  strings.Join(initial, ","),
			})
		}
		settings["data-dir"] = filepath.Join(s.dir, dir)
		if err := add("etcd", n, metrics+"/metrics", merge(s.identitySettings("etcd"), settings)); err != nil {
			return err
		}
	}
	for n, address := range addresses["nats"] {
		dir, settings := "nats", map[string]any{"listen-address": address, "jetstream-key-file": s.pki.JetStreamKey()}
		if len(routes) > 1 {
			dir = fmt.Sprintf("nats-%d", n)
			settings = merge(settings, map[string]any{
				"name":                   dir,
				"cluster-listen-address": routes[n],
				"cluster-routes":         strings.Join(routes, ","),
			})
		}
		settings["data-dir"] = filepath.Join(s.dir, dir)
		if err := add("nats", n, "", merge(s.identitySettings("nats"), settings)); err != nil {
			return err
		}
	}
	return nil
}

func urls(scheme string, addresses []string) string {
	var all []string
	for _, a := range addresses {
		all = append(all, scheme+"://"+a)
	}
	return strings.Join(all, ",")
}

func total(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

func merge(all ...map[string]any) map[string]any {
	out := map[string]any{}
	for _, m := range all {
		maps.Copy(out, m)
	}
	return out
}

func (s *splitRun) identitySettings(name string) map[string]any {
	id := s.pki.Identity(name)
	return map[string]any{"rpc-cert-file": id.CertFile, "rpc-key-file": id.KeyFile, "rpc-ca-file": id.CAFile}
}

// freePorts finds free ports below the ephemeral port range, because a restarted process needs its previous port.
func freePorts(n int) ([]int, error) {
	const low, high = 20000, 32000
	var ports []int
	for try := 0; len(ports) < n; try++ {
		if try > 20*n {
			return nil, fmt.Errorf("no %d free ports from %d to %d", n, low, high)
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", low+rand.IntN(high-low)))
		if err != nil {
			continue
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
