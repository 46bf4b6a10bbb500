package main

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// plan chooses addresses and writes the configuration of each process.
func (s *splitRun) plan() ([]*child, error) {
	previous, err := s.previousPeers()
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(3*total(s.counts), previous...)
	if err != nil {
		return nil, err
	}
	nextAddress := func() string {
		p := ports[0]
		ports = ports[1:]
		return fmt.Sprintf("127.0.0.1:%d", p)
	}
	s.addresses = map[string][]string{}
	for name := range stores {
		for n := range s.counts[name] {
			s.addresses[name] = append(s.addresses[name], s.rpcAddress(name, n, nextAddress()))
		}
	}
	for _, set := range s.sets {
		for n := range s.counts[set.name] {
			s.addAddress(set, s.rpcAddress(set.name, n, nextAddress()))
		}
	}
	var all []*child
	add := func(command string, n int, debug string, settings map[string]any) error {
		p, err := s.planProcess(command, n, command, debug, settings)
		all = append(all, p)
		return err
	}
	if err := s.planStores(previous, nextAddress, add); err != nil {
		return nil, err
	}
	flags := pflag.NewFlagSet("xds", pflag.ContinueOnError)
	new(telemetry.Options).AddFlags(flags)
	for n := range s.counts["xds"] {
		debug := s.debugSocket("xds", n)
		if err := add("xds", n, debug, merge(s.identitySettings("xds"), s.fromCommandLine(flags), map[string]any{
			"rpc-address":   s.addresses["xds"][n],
			"debug-address": debug,
			"replicas-file": s.replicasFile(),
			"state-file":    filepath.Join(s.dir, "xds", fmt.Sprintf("state-%d.json", n)),
		})); err != nil {
			return nil, err
		}
	}
	for _, set := range s.sets {
		for n := range s.counts[set.name] {
			p, err := s.planSet(set, n)
			if err != nil {
				return nil, err
			}
			all = append(all, p)
		}
	}
	return all, s.writeReplicas()
}

// removeOthers removes the configuration of processes that are not in the plan, such as processes of another placement.
// status and check expect a process for each configuration. It also removes the addresses that processes received from
// xDS before: in a copied directory, these are the sockets of the original. There, the ends of the event log are of the
// original too. Other files of the directory stay.
func (s *splitRun) removeOthers(planned []*child) error {
	sets := slices.Collect(maps.Keys(stores))
	for _, placement := range placements {
		for _, set := range placement {
			sets = append(sets, set.name)
		}
	}
	ofProcess := regexp.MustCompile(`^(` + strings.Join(sets, "|") + `)-[0-9]+\.yaml$`)
	files, err := os.ReadDir(filepath.Dir(s.configFile("")))
	for _, f := range files {
		path := s.configFile(strings.TrimSuffix(f.Name(), ".yaml"))
		isPlanned := slices.ContainsFunc(planned, func(p *child) bool { return p.config == path })
		if ofProcess.MatchString(f.Name()) && !isPlanned {
			err = errors.Join(err, os.Remove(path))
		}
	}
	err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, "log-end")))
	received, _ := os.ReadDir(filepath.Join(s.dir, "xds"))
	for _, d := range received {
		if d.IsDir() {
			err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, "xds", d.Name())))
		}
	}
	return err
}

// addAddress adds the address of another process to the services that it serves.
func (s *splitRun) addAddress(set set, address string) {
	for _, service := range newProcess(set.targets).Exposed() {
		s.addresses[service] = append(s.addresses[service], address)
	}
}

// newProcess returns a process with targets of the table of placements.
func newProcess(targets []string) *process.Process {
	p, err := process.New(modules, targets)
	if err != nil {
		panic(err) // the table names a service that does not exist
	}
	return p
}

// fromCommandLine returns the flags of the command line that a process has, as settings.
func (s *splitRun) fromCommandLine(process *pflag.FlagSet) map[string]any {
	values := map[string]any{}
	process.VisitAll(func(own *pflag.Flag) {
		if f := s.flags.Lookup(own.Name); f != nil && f.Changed && !slices.Contains(splitOnlyFlags, f.Name) {
			values[f.Name] = config.FileValue(f)
		}
	})
	return values
}

// planProcess returns the n-th process of a set or store, which runs a command. It writes the configuration.
func (s *splitRun) planProcess(set string, n int, command, debug string, settings map[string]any) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &child{
		set:     set,
		name:    fmt.Sprintf("%s-%d", set, n),
		dir:     s.dir,
		program: self,
		logs:    s.logs,
		debug:   debug,
		show:    s.show,

		memoryLimit: process.MemoryShare(total(s.counts)),
	}
	p.config = s.configFile(p.name)
	p.args = []string{command, "--config", p.config}
	if err := os.MkdirAll(filepath.Dir(p.config), 0o700); err != nil {
		return nil, err
	}
	return p, writeYAML(p.config, settings)
}

// planSet returns the n-th process of a set. It writes and checks its configuration.
func (s *splitRun) planSet(set set, n int) (*child, error) {
	p, err := s.planProcess(set.name, n, "run", s.debugSocket(set.name, n), s.settingsOf(set, n))
	if err != nil {
		return nil, err
	}
	configured, err := process.Load(modules, set.targets, p.name, p.args[1:])
	if err != nil {
		return nil, err
	}
	p.stopTimeout = configured.StopTimeout()
	return p, nil
}

// settingsOf returns the settings of the n-th process of a set.
func (s *splitRun) settingsOf(set set, n int) map[string]any {
	etcd := s.pki.Identity("registry")
	all := merge(s.settings(s.flags), s.identitySettings(rpc.ServicePlaceholder), map[string]any{
		"xds-servers":         strings.Join(s.addresses["xds"], ","),
		"xds-cache-dir":       filepath.Join(s.dir, "xds", fmt.Sprintf("%s-%d", set.name, n)),
		"log-end-dir":         filepath.Join(s.dir, "log-end", fmt.Sprintf("%s-%d", set.name, n)),
		"permit-port-sharing": true,
		"etcd-servers":        urls("https", s.addresses["etcd"]),
		"etcd-certfile":       etcd.CertFile,
		"etcd-keyfile":        etcd.KeyFile,
		"etcd-cafile":         etcd.CAFile,
		"nats-url":            urls("tls", s.addresses["nats"]),
		"log-replicas":        s.counts["nats"],
		"debug-address":       s.debugSocket(set.name, n),
	})
	p, flags := newProcess(set.targets), pflag.NewFlagSet(set.name, pflag.ContinueOnError)
	p.AddNetworkFlags(flags)
	p.AddFlags(flags)
	for _, m := range modules {
		all[m.Name+"-addresses"] = strings.Join(s.addresses[m.Name], ",")
	}
	if exposed := p.Exposed(); len(exposed) > 0 {
		all["rpc-address"] = s.addresses[exposed[0]][n]
	}
	maps.DeleteFunc(all, func(name string, _ any) bool { return flags.Lookup(name) == nil })
	settings := merge(all, s.fromCommandLine(flags), map[string]any{"target": set.targets})
	if path, ok := settings[auditLogPath].(string); ok {
		settings[auditLogPath] = perProcessPath(path, n)
	}
	return settings
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
		if addresses := s.addresses[m.Name]; len(addresses) > 0 {
			all[m.Name] = addresses
		}
	}
	if err := os.MkdirAll(filepath.Dir(s.replicasFile()), 0o700); err != nil {
		return err
	}
	return writeYAML(s.replicasFile(), all)
}

// planStores configures the members of etcd and the servers of NATS, as single processes or as clusters. previous
// has the peer addresses of the members of etcd at the previous start.
func (s *splitRun) planStores(previous []string, nextAddress func() string,
	add func(string, int, string, map[string]any) error) error {
	peers := func(name string) (own []string) {
		for range s.counts[name] {
			own = append(own, nextAddress())
		}
		return own
	}
	flags := pflag.NewFlagSet("logs", pflag.ContinueOnError)
	new(telemetry.Options).AddLogFlags(flags)
	logs := s.fromCommandLine(flags)
	members, routes := peers("etcd"), peers("nats")
	if len(previous) == len(members) {
		members = previous
	}
	s.peers, s.lost = members, s.lostMembers(len(members))
	var initial []string
	for n, m := range members {
		initial = append(initial, etcdMember(n)+"=https://"+m)
	}
	for n, address := range s.addresses["etcd"] {
		metrics, dir := "http://"+nextAddress(), "etcd"
		settings := map[string]any{"listen-client-urls": "https://" + address, "listen-metrics-urls": metrics}
		if len(members) > 1 {
			dir = etcdMember(n)
			settings = merge(settings, map[string]any{
				"name":             dir,
				"listen-peer-urls": "https://" + members[n],
				"initial-cluster":  strings.Join(initial, ","),
			})
		}
		if slices.Contains(s.lost, dir) {
			settings["initial-cluster-state"] = "existing"
		}
		settings["data-dir"] = filepath.Join(s.dir, dir)
		if err := add("etcd", n, metrics+"/metrics", merge(s.identitySettings("etcd"), logs, settings)); err != nil {
			return err
		}
	}
	for n, address := range s.addresses["nats"] {
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
		if err := add("nats", n, "", merge(s.identitySettings("nats"), logs, settings)); err != nil {
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

// freePorts finds free ports below the ephemeral port range, because a restarted process needs its previous port. It
// leaves out the ports of previous addresses, and the ports that another process of Watershed has found.
func freePorts(n int, previous ...string) ([]int, error) {
	const low, high = 20000, 32000
	for _, address := range previous {
		_ = reserve(address)
	}
	var ports []int
	var last error
	for try := 0; len(ports) < n; try++ {
		if try > 20*n {
			return nil, fmt.Errorf("no %d free ports from %d to %d: %v", n, low, high, last)
		}
		address := fmt.Sprintf("127.0.0.1:%d", low+rand.IntN(high-low))
		if last = reserve(address); last != nil {
			continue
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			last = err
			release(address)
			continue
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// reservations has the listeners of reserve, by address.
var reservations sync.Map

// reserve reserves an address until this process ends, because its child listens seconds later, and again after a
// restart. The reservation is an abstract Unix socket. Such a socket belongs to a network namespace, as ports do.
func reserve(address string) error {
	l, err := net.Listen("unix", "@watershed-"+address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return err
	}
	if err == nil { // other systems than Linux have no such sockets
		reservations.Store(address, l)
	}
	return nil
}

// release ends the reservation of an address.
func release(address string) {
	if l, ok := reservations.LoadAndDelete(address); ok {
		l.(net.Listener).Close()
	}
}
