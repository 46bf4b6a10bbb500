package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"watershed.dev/test/harness"
	"watershed.dev/test/node"
)

var haRun = flag.Bool("ha", false, "run overlays/ha on three network namespaces of this machine as nodes (as root)")

// TestThreeNodes runs overlays/ha on three nodes. Clients must not notice that a node is disconnected, loses its power
// or is drained, and must lose nothing when all nodes lose their power at once.
func TestThreeNodes(t *testing.T) {
	if !*haRun {
		t.Skip("it makes this machine three nodes, as root, and takes what `make e2e-ha` builds: run that")
	}
	h := &hosted{report: newReport(t), placement: "split"}
	h.host(3, built(t, *from, "make e2e-ha"), "coredns")
	began := time.Now()
	h.outer.Kubectl("apply", "-k", filepath.Join(harness.Root(), "deploy", "k8s", "overlays", "ha"))
	h.all()
	fmt.Printf("\noverlays/ha is ready %.1f s after kubectl apply.\n", time.Since(began).Seconds())
	fmt.Print(h.outer.Kubectl("-n", "watershed", "get", "pods", "-o", "wide"))
	h.connect()
	b := h.balance()
	c, err := start(t.Context(), h.inner, *watchers, writePause)
	if err != nil {
		t.Fatal(err)
	}
	h.phase(c, "nothing happens", true, func() { time.Sleep(5 * time.Second) })
	t.Cleanup(func() { h.table.Flush() })
	for _, n := range h.nodes {
		h.phase(c, n.Name+" disconnected", true, func() {
			b.lose(n.Name)
			n.Disconnect()
			time.Sleep(lostFor)
		})
		h.phase(c, n.Name+" connected again", true, func() { h.restored(b, n, n.Connect) })
	}
	for i, n := range h.nodes {
		h.phase(c, n.Name+" without power", true, func() {
			b.lose(n.Name)
			n.PowerOff()
			time.Sleep(lostFor)
			if i == 0 {
				h.nodeIs(n, "NotReady") // and its pods leave the endpoints of Services
			}
		})
		h.phase(c, n.Name+" with power again", true, func() { h.restored(b, n, n.PowerOn) })
	}
	for _, n := range h.nodes {
		h.phase(c, n.Name+" drained", true, func() {
			h.drain(n)
			h.outer.Kubectl("uncordon", n.Name)
			h.all()
		})
	}
	h.phase(c, "no node with power for a while", true, func() {
		for _, n := range h.nodes {
			b.lose(n.Name)
			n.PowerOff()
		}
		time.Sleep(5 * time.Second)
		for _, n := range h.nodes {
			n.PowerOn()
			b.found(n.Name)
		}
		for _, n := range h.nodes {
			h.nodeIs(n, "Ready")
		}
		h.all()
	})
	for _, w := range c.stop() {
		t.Error(w)
	}
}

// balance makes the clients connect to the pods of the gateways, because this machine is not a node of the cluster.
func (h *hosted) balance() *balancer {
	h.Helper()
	b := &balancer{open: map[*balanced]bool{}, lost: map[string]bool{}}
	h.Cleanup(b.follow(h))
	h.inner.Host, h.inner.Dial = "https://gateway.watershed.svc", b.dial
	harness.Eventually(h, harness.Soon, func() error {
		conn, err := b.dial(h.Context(), "tcp", "")
		if err == nil {
			conn.Close()
		}
		return err
	})
	return b
}

// lostFor is a span in which the other nodes must do the work.
const lostFor = 20 * time.Second

// all waits until each workload has all its replicas. kubectl has no rollout status of OnDelete StatefulSets.
func (h *hosted) all() {
	h.Helper()
	for _, s := range []string{"etcd", "nats"} {
		h.outer.Kubectl("-n", "watershed", "wait", "--for=jsonpath={.status.readyReplicas}=3", "statefulset/"+s,
			"--timeout=110s")
	}
	for _, s := range placements["split"] {
		h.rollout("watershed", "deployment/"+s)
	}
}

// drain evicts the pods of a node. It waits for the PodDisruptionBudgets.
func (h *hosted) drain(n *node.Node) {
	h.Helper()
	harness.Eventually(h, 5*time.Minute, func() error {
		out, err := h.outer.TryKubectl("", "drain", n.Name, "--delete-emptydir-data", "--ignore-daemonsets",
			"--timeout=100s")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// restored restores a node, and waits until it and all workloads are ready.
func (h *hosted) restored(b *balancer, n *node.Node, restore func()) {
	h.Helper()
	restore()
	h.nodeIs(n, "Ready")
	b.found(n.Name)
	h.all()
}

// nodeIs waits until the node lifecycle controller and kubelet report a status of a node.
func (h *hosted) nodeIs(n *node.Node, status string) {
	h.Helper()
	harness.Eventually(h, 3*time.Minute, func() error {
		out := h.outer.Kubectl("get", "node", n.Name, "--no-headers")
		if fields := strings.Fields(out); len(fields) < 2 || strings.Split(fields[1], ",")[0] != status {
			return errors.New(out)
		}
		return nil
	})
}

// balancer is a load balancer before the gateways. It follows the endpoints of their Service, and its health checks
// find a lost node at once. So the clients measure only the effects behind the gateways.
type balancer struct {
	mu        sync.Mutex
	addresses map[string]string // node by address
	lost      map[string]bool
	next      int
	open      map[*balanced]bool
}

// balanced is a connection to a gateway.
type balanced struct {
	net.Conn
	b    *balancer
	node string
}

func (c *balanced) Close() error {
	c.b.mu.Lock()
	delete(c.b.open, c)
	c.b.mu.Unlock()
	return c.Conn.Close()
}

// follow reads the ready endpoints of the Service gateway until the returned function is called.
func (b *balancer) follow(h *hosted) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			out, err := exec.CommandContext(ctx, harness.Peer("kubectl"), "--kubeconfig", h.outer.Kubeconfig,
				"-n", "watershed", "get", "endpointslices", "-l", "kubernetes.io/service-name=gateway", "-o",
				`jsonpath={range .items[*].endpoints[?(@.conditions.ready==true)]}{.addresses[0]} {.nodeName}{"\n"}{end}`).
				Output()
			if err == nil {
				found := map[string]string{}
				for line := range strings.Lines(string(out)) {
					if f := strings.Fields(line); len(f) == 2 {
						found[f[0]] = f[1]
					}
				}
				b.mu.Lock()
				b.addresses = found
				b.mu.Unlock()
			}
			breathe(ctx)
		}
	})
	return func() { cancel(); done.Wait() }
}

// dial connects to the next gateway.
func (b *balancer) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	address, name, err := b.gateway()
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: 5 * time.Second}
	conn, err := d.DialContext(ctx, network, net.JoinHostPort(address, "6443"))
	if err != nil {
		return nil, err
	}
	c := &balanced{conn, b, name}
	b.mu.Lock()
	b.open[c] = true
	b.mu.Unlock()
	return c, nil
}

// gateway returns the address and the node of the next gateway.
func (b *balancer) gateway() (address, name string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []string
	for a, n := range b.addresses {
		if !b.lost[n] {
			all = append(all, a)
		}
	}
	if len(all) == 0 {
		return "", "", errors.New("no gateway is ready")
	}
	slices.Sort(all)
	address = all[b.next%len(all)]
	b.next++
	return address, b.addresses[address], nil
}

// lose removes a node, and ends the connections to it.
func (b *balancer) lose(name string) {
	b.mu.Lock()
	b.lost[name] = true
	var ended []*balanced
	for c := range b.open {
		if c.node == name {
			ended = append(ended, c)
		}
	}
	b.mu.Unlock()
	for _, c := range ended {
		c.Close()
	}
}

// found adds a node again.
func (b *balancer) found(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.lost, name)
}
