package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// clusterNamespaces and clusterDeployments are the namespaces, and the Deployments in each.
	clusterNamespaces, clusterDeployments = 10, 10
	// clusterTimeout bounds each wait for objects.
	clusterTimeout = 20 * time.Minute
	// probePath is the collection of the probes' ConfigMaps, p0 to p15.
	probePath    = "/api/v1/namespaces/probe/configmaps"
	probeObjects = 16
	// nodesPerConnection is the number of nodes that share an http.Client.
	nodesPerConnection = 20
)

// nodeWatches are the first watches of a node: kubelet's, kube-proxy's and a network plugin's. Kubelet also watches
// ConfigMaps by name. %d is the node.
var nodeWatches = []string{
	"/api/v1/pods?fieldSelector=spec.nodeName%%3Dnode-%d",
	"/api/v1/nodes?fieldSelector=metadata.name%%3Dnode-%d",
	"/api/v1/services?x=%d",
	"/apis/discovery.k8s.io/v1/endpointslices?labelSelector=none%%3D%d",
	"/apis/node.k8s.io/v1/runtimeclasses?x=%d",
	"/apis/storage.k8s.io/v1/csidrivers?x=%d",
	"/apis/networking.k8s.io/v1/networkpolicies?x=%d",
	"/api/v1/namespaces?x=%d",
}

// clusterLoad measures the load of a whole cluster on each kind of server: kwok's nodes, kube-controller-manager and
// kube-scheduler. The servers run in sequence, because all share the processors. It replaces
// the tables of a page.
func clusterLoad(dir string) {
	var tables []string
	for _, k := range selected() {
		c := k.startCluster(dir, *nodes)
		c.run()
		c.stop()
		tables = append(tables, c.table())
		log.Print(tables[len(tables)-1])
	}
	if *only == "" || *page {
		file := filepath.Join(filepath.Dir(*out), "cluster-load.md")
		check(writeBetween(file, begin, end, strings.Join(tables, "\n")))
	}
}

// cluster is a server with a cluster's clients.
type cluster struct {
	*server
	dir   string
	nodes int
	// ended counts the watches that ended early.
	ended    atomic.Int64
	watching sync.WaitGroup
	// rows are the rows of the table.
	rows []string
}

// startCluster starts a server in a directory of its own below dir, for a cluster of so many nodes.
func (k kind) startCluster(dir string, nodes int) *cluster {
	s, d := k.startIn(dir)
	return &cluster{server: s, dir: d, nodes: nodes}
}

func (c *cluster) run() {
	c.do("POST", "/api/v1/namespaces", "", []byte(
		`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"probe"}}`), 201)
	for i := range probeObjects {
		c.do("POST", probePath, "", fmt.Appendf(nil,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"p%d"}}`, i), 201)
	}
	stop := c.startClients()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer func() { cancel(); c.watching.Wait() }()
	c.phase(fmt.Sprintf("%d nodes join", c.nodes), c.join)
	c.phase(fmt.Sprintf("%d watches open", c.nodes**watchesPerNode), func() { c.watch(ctx) })
	c.phase("at rest", func() { time.Sleep(*atRest) })
	for n := range clusterNamespaces {
		c.do("POST", "/api/v1/namespaces", "", fmt.Appendf(nil,
			`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"load-%d"}}`, n), 201)
	}
	deployments := func(do func(path, name string)) {
		c.each("", clusterNamespaces*clusterDeployments, func(i int) {
			do(fmt.Sprintf("/apis/apps/v1/namespaces/load-%d/deployments", i%clusterNamespaces), fmt.Sprintf("d%d", i))
		})
	}
	replicas := c.nodes / (clusterNamespaces * clusterDeployments)
	pods := replicas * clusterNamespaces * clusterDeployments
	c.phase(fmt.Sprintf("%d pods of %d Deployments run", pods, clusterNamespaces*clusterDeployments), func() {
		deployments(func(path, name string) { c.do("POST", path, "", deployment(name, replicas), 201) })
		c.await("/api/v1/pods?labelSelector=load%3D1", pods, `"phase":"Running"`)
	})
	c.phase("all Deployments roll out", func() {
		deployments(func(path, name string) {
			c.do("PATCH", path+"/"+name, "", []byte(
				`{"spec":{"template":{"metadata":{"labels":{"load":"2"}}}}}`), 200)
		})
		c.await("/api/v1/pods?labelSelector=load%3D2", pods, `"phase":"Running"`)
	})
	c.phase("20 clients list all pods each second, for 30 s", func() {
		stop := c.startStorm("relist")
		time.Sleep(30 * time.Second)
		stop()
	})
	c.phase("all Deployments are deleted", func() {
		deployments(func(path, name string) { c.do("DELETE", path+"/"+name, "", nil, 200) })
		c.await("/api/v1/pods?labelSelector=load", 0, "")
	})
}

// join creates the nodes, and waits until kwok has made them ready.
func (c *cluster) join() {
	c.each("", c.nodes, func(i int) { c.do("POST", "/api/v1/nodes", "", node(i), 201) })
	c.await("/api/v1/nodes", c.nodes, `"type":"Ready"`)
}

// startClients starts kube-controller-manager, kube-scheduler and kwok as administrator.
func (c *cluster) startClients() (stop func()) {
	pki := filepath.Join(filepath.Dir(c.kubeconfig), "pki")
	fast := []string{"--kube-api-qps", "1000", "--kube-api-burst", "2000"}
	var started []*exec.Cmd
	start := func(name string, args ...string) {
		args = append(args, "--kubeconfig", c.kubeconfig, "--master", c.url)
		cmd, _ := run(c.dir, name, absolute(filepath.Join(*bin, name)), args...)
		started = append(started, cmd)
	}
	start("kube-controller-manager", append(fast, "--service-account-private-key-file", pki+"/sa.key",
		"--root-ca-file", pki+"/ca.crt", "--leader-elect=false", "--secure-port", "0",
		"--concurrent-deployment-syncs", "20", "--concurrent-replicaset-syncs", "20")...)
	start("kube-scheduler", append(fast, "--leader-elect=false", "--secure-port", "0")...)
	start("kwok", "--manage-all-nodes=true", "--cidr", "10.0.0.0/8", "--node-lease-duration-seconds", "40",
		"--config", absolute(filepath.Join(*bin, "kwok-stages.yaml")))
	return func() {
		for _, cmd := range started {
			_ = cmd.Process.Signal(syscall.SIGKILL)
			_ = cmd.Wait()
		}
	}
}

func node(i int) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node-%d","labels":{`+
		`"kubernetes.io/hostname":"node-%d","kubernetes.io/os":"linux","kubernetes.io/arch":"amd64"}},"status":{`+
		`"allocatable":{"cpu":"32","memory":"256Gi","pods":"110"},"capacity":{"cpu":"32","memory":"256Gi",`+
		`"pods":"110"}}}`, i, i)
}

func deployment(name string, replicas int) []byte {
	return fmt.Appendf(nil, `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":%q},"spec":{"replicas":%d,`+
		`"strategy":{"rollingUpdate":{"maxSurge":"50%%","maxUnavailable":"50%%"}},"selector":{"matchLabels":{`+
		`"app":%q}},"template":{"metadata":{"labels":{"app":%q,"load":"1"}},"spec":{"containers":[{"name":"c",`+
		`"image":"registry.example/app:1.2.3","env":[{"name":"LEVEL","value":"info"}],"resources":{"requests":{`+
		`"cpu":"10m","memory":"16Mi"}}}]}}}}`, name, replicas, name, name)
}

// await waits until a list has n objects with the text.
func (c *cluster) await(path string, n int, text string) {
	for deadline := time.Now().Add(clusterTimeout); time.Now().Before(deadline); time.Sleep(time.Second) {
		var list struct {
			Items []json.RawMessage `json:"items"`
		}
		check(json.Unmarshal(c.do("GET", path, "", nil, 200), &list))
		with := 0
		for _, item := range list.Items {
			if bytes.Contains(item, []byte(text)) {
				with++
			}
		}
		if with == n && (n > 0 || len(list.Items) == 0) {
			return
		}
	}
	log.Fatalf("%s: %s has not %d objects with %s", c.name, path, n, text)
}

// watch opens the watches of all nodes, in sequence on each connection.
func (c *cluster) watch(ctx context.Context) {
	var opened sync.WaitGroup
	for first := 0; first < c.nodes; first += nodesPerConnection {
		conn := &http.Client{Transport: c.client.Transport.(*http.Transport).Clone()}
		opened.Go(func() {
			for i := first; i < min(first+nodesPerConnection, c.nodes); i++ {
				for w := range *watchesPerNode {
					const byName = "/api/v1/namespaces/default/configmaps?fieldSelector=metadata.name%%3Dc%d-%d"
					path := fmt.Sprintf(byName, i, w)
					if w < len(nodeWatches) {
						path = fmt.Sprintf(nodeWatches[w], i)
					}
					open := make(chan struct{})
					c.watching.Go(func() { c.watchOne(ctx, conn, path, sync.OnceFunc(func() { close(open) })) })
					<-open
				}
			}
		})
	}
	opened.Wait()
}

// watchOne opens a watch without a resourceVersion, and reopens it until ctx ends. It calls opened.
func (c *cluster) watchOne(ctx context.Context, conn *http.Client, path string, opened func()) {
	for ; ctx.Err() == nil; time.Sleep(time.Second) {
		resp, err := c.openWatch(ctx, conn, path+"&watch=true&allowWatchBookmarks=true&timeoutSeconds=86400",
			"application/vnd.kubernetes.protobuf;stream=watch")
		if err != nil {
			continue
		}
		opened()
		var buffer [512]byte
		began, last := time.Now(), 0
		for err == nil {
			var n int
			if n, err = resp.Body.Read(buffer[:]); n > 0 {
				last = n
			}
		}
		resp.Body.Close()
		if ctx.Err() == nil {
			c.ended.Add(1)
			log.Printf("%s: the watch of %s ended after %s: %v, its last bytes are %q", c.name, path,
				time.Since(began), err, buffer[:last])
		}
	}
}

// phase measures the server and the probes during do.
func (c *cluster) phase(name string, do func()) {
	ctx, cancel := context.WithCancel(context.Background())
	latencies := c.probe(ctx)
	before, began, ended, first := c.cpu(), time.Now(), c.ended.Load(), c.revision()
	do()
	took, used, written := time.Since(began).Seconds(), c.cpu()-before, float64(c.revision()-first)
	cancel()
	row := []string{name, plain(took), plain(used / took), plain(written / took), plain(written / used),
		plain(c.memory())}
	row = append(append(row, latencies()...), fmt.Sprint(c.ended.Load()-ended))
	c.rows = append(c.rows, "| "+strings.Join(row, " | ")+" |")
	log.Printf("%s: %s", c.name, c.rows[len(c.rows)-1])
}

// table returns the server's table.
func (c *cluster) table() string {
	return fmt.Sprintf("%s, %s, %d processors:\n\n", c.name, time.Now().UTC().Format(time.DateOnly), runtime.NumCPU()) +
		"| phase | s | cores | writes a second | writes a core second | MB | write, ms | GET, ms | LIST, ms | event age, ms | " +
		"failed or late, % | watches ended |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n" + strings.Join(c.rows, "\n") + "\n"
}

// revision returns etcd's revision.
func (c *cluster) revision() int64 {
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	check(json.Unmarshal(c.do("GET", probePath+"?limit=1", "", nil, 200), &list))
	n, err := strconv.ParseInt(list.Metadata.ResourceVersion, 10, 64)
	check(err)
	return n
}

// probe writes and reads at fixed rates until ctx ends. The returned function waits for the requests. It returns the
// percentiles of the latencies of writes, GETs and LISTs, and of the ages of the writes' events. The last cell is the
// percentage of requests that failed or took longer than requestTimeout.
func (c *cluster) probe(ctx context.Context) func() []string {
	events := &watches{}
	var running sync.WaitGroup
	resp, err := c.openWatch(ctx, c.client,
		probePath+"?watch=true&resourceVersion="+strconv.FormatInt(c.revision(), 10), "")
	check(err)
	running.Go(func() {
		defer resp.Body.Close()
		events.read(bufio.NewReaderSize(resp.Body, 8<<10))
		if ctx.Err() == nil {
			c.ended.Add(1)
		}
	})
	send := func(method, path string) func(context.Context, int) (*http.Response, error) {
		return func(ctx context.Context, i int) (*http.Response, error) {
			var body io.Reader
			if method == http.MethodPatch {
				body = strings.NewReader(fmt.Sprintf(`{"data":{"sent":"%019d"}}`, time.Now().UnixNano()))
			}
			req, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf(c.url+path, i%probeObjects), body)
			check(err)
			req.Header.Set("Content-Type", "application/merge-patch+json")
			return c.client.Do(req)
		}
	}
	var measured map[string]*outcome
	running.Go(func() {
		measured = c.server.measured(ctx, map[string]other{
			"write": {every: 50 * time.Millisecond, ask: send(http.MethodPatch, probePath+"/p%d")},
			"get":   {every: 50 * time.Millisecond, ask: send(http.MethodGet, probePath+"/p%d")},
			"list": {every: 500 * time.Millisecond,
				ask: send(http.MethodGet, "/api/v1/pods?fieldSelector=spec.nodeName%%3Dnode-%d")},
		})
	})
	return func() (cells []string) {
		running.Wait()
		failed, all := 0, 0
		for _, name := range []string{"write", "get", "list"} {
			o := measured[name]
			cells = append(cells, twoPercentiles(o.took))
			failed, all = failed+o.failed, all+len(o.took)
		}
		return append(cells, twoPercentiles(events.ages), plain(100*float64(failed)/float64(max(all, 1))))
	}
}

// twoPercentiles returns the p50 and the p99 in milliseconds.
func twoPercentiles(of []time.Duration) string {
	if len(of) == 0 {
		return "none"
	}
	return plain(percentile(of, 50)) + " / " + plain(percentile(of, 99))
}
