package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
)

// defaultReplicas is the default number of processes of each service.
var defaultReplicas = map[string]int{
	"etcd":        1,
	"nats":        1,
	"xds":         1,
	"gateway":     2,
	"registry":    2,
	"watchfanout": 2,
	"authn":       1,
	"authz":       1,
	"admission":   1,
}

// restartPause is the delay before an ended process starts again.
const restartPause = 200 * time.Millisecond

// split runs every service in its own process, with its own certificate, from configuration files as in a deployment.
// It restarts processes that end. A process that ends twice in a row with the same error aborts the start.
func split(args []string) error {
	if len(args) > 0 && args[0] == "scale" {
		return scaleCommand(args[1:])
	}
	began := time.Now()
	fs := pflag.NewFlagSet("watershed split", pflag.ContinueOnError)
	dataDir := fs.String("data-dir", ".watershed",
		"The directory of all data, with a pid file, a log and a configuration of each process.")
	port := fs.Int("secure-port", 6443, "The shared port of the gateways.")
	bind := fs.String("bind-address", "0.0.0.0", "The listen address of the gateways.")
	hosts := fs.StringSlice("tls-sans", nil, "Additional names and addresses of the serving certificate.")
	replicas := fs.StringToInt("replicas", nil,
		"The number of processes of a service: watchfanout=4,gateway=3; also etcd=3 and nats=3.")
	network := fs.String("rpc-network", defaultNetwork(),
		`The network between services: "unix" for sockets, or "tcp" with TLS, as between machines.`)
	dryRun := fs.Bool("dry-run", false,
		"Write every process's configuration and print the commands, without running them.")
	var logs logFiles
	logs.addFlags(fs)
	services := newSplitFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return process.ExitOnHelp(err)
	}
	counts, err := replicaCounts(*replicas)
	if err != nil {
		return err
	}
	if *network != defaultNetwork() && *network != "tcp" {
		return fmt.Errorf(`--rpc-network %q: want "tcp" or, on Linux, "unix"`, *network)
	}
	l, err := openLayout(*dataDir, *bind, *port, append(*hosts, advertised(fs)...), logs)
	if err != nil {
		return err
	}
	defer l.close()
	s := &splitRun{
		layout:          l,
		counts:          counts,
		fromCommandLine: services.fromCommandLine(fs),
		bind:            *bind,
		network:         *network,
		spawn:           make(spawner),
	}
	processes, err := s.plan()
	if err != nil {
		return err
	}
	if *dryRun {
		for _, p := range processes {
			fmt.Printf("watershed %s --config %s\n", p.command, p.config)
		}
		return nil
	}
	return s.run(processes, began)
}

// defaultNetwork returns the default of --rpc-network.
func defaultNetwork() string {
	if rpc.SocketsSupported {
		return "unix"
	}
	return "tcp"
}

// replicaCounts returns the number of processes of each service.
func replicaCounts(replicas map[string]int) (map[string]int, error) {
	counts := maps.Clone(defaultReplicas)
	for name, n := range replicas {
		if _, ok := defaultReplicas[name]; !ok || n < 1 {
			return nil, fmt.Errorf("--replicas %s=%d: want a service (etcd, nats, %s) and a number above 0", name, n,
				strings.Join(moduleNames(), ", "))
		}
		counts[name] = n
	}
	return counts, nil
}

// run starts every process and restarts ended ones. It returns after a signal, or if a process is refused during the
// start.
func (s *splitRun) run(processes []*child, began time.Time) error {
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	go s.spawn.run()
	go s.pki.Renew(ctx)
	fmt.Printf("Watershed %s starts %d processes in %s\n", version.Release(), len(processes), s.dir)
	s.processes = processes
	starting, refused := context.WithCancelCause(ctx)
	defer refused(nil)
	for _, p := range processes {
		p.onRefused = func(reason error) bool {
			refused(reason)
			return !s.started.Load()
		}
		p.start(s.spawn)
	}
	defer func() {
		s.mu.Lock() // never unlocked: scaling has ended
		for _, p := range s.processes {
			p.disableRestart()
		}
		for _, p := range slices.Backward(s.processes) {
			p.stop()
		}
	}()
	if err := s.ready(starting); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	s.started.Store(true)
	for _, p := range processes {
		fmt.Printf("  %-14s pid %-8d %s\n", p.name, p.pid(), p.debug)
	}
	fmt.Printf("Ready after %.1f s.\n\n  export KUBECONFIG=%s\n  kubectl get namespaces\n\nCtrl-C stops.\n",
		time.Since(began).Seconds(), s.pki.AdminKubeconfig())
	return s.serveControl(ctx)
}

type splitRun struct {
	*layout
	counts map[string]int
	// fromCommandLine holds the flags of the command line for the processes of each service, and of "xds".
	fromCommandLine map[string]map[string]any
	bind            string
	// network is "unix" or "tcp": the network between services.
	network string
	spawn   spawner
	// addresses lists the RPC addresses of each service's processes.
	addresses map[string][]string

	// started is true after the start. From then on an ended process always restarts.
	started atomic.Bool

	// scaling is held until a removed process has ended, because a new process may use the same name and files.
	scaling   sync.Mutex
	mu        sync.Mutex
	processes []*child
}

// ready waits until a gateway is ready. If ctx is done first, the error is its cause.
func (s *splitRun) ready(ctx context.Context) error {
	pem, err := os.ReadFile(s.pki.CA.CertFile())
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	client := &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true},
	}
	slow := time.Now().Add(15 * time.Second)
	for {
		err := get(ctx, client, "https://"+net.JoinHostPort(s.address, strconv.Itoa(s.port))+"/readyz")
		if err == nil {
			return nil
		}
		if time.Now().After(slow) {
			fmt.Fprintf(os.Stderr, "Not ready yet: %v. The logs are in %s.\n", err, s.dir)
			slow = time.Now().Add(15 * time.Second)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func get(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
