package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"
)

// process is a process of the cluster. It restarts whenever it ends.
//
//	running → (fault, or an unexpected end) → down for p.down → lost data removed → running
type process struct {
	name, command, config string
	// data is the process's --data-dir, if it has one.
	data    string
	cluster *cluster

	mu      sync.Mutex
	cmd     *exec.Cmd
	done    chan struct{}
	stopped bool
	// down is the delay before the next restart.
	down           time.Duration
	endExpected    bool
	unexpectedEnds int
	// lost is a path to remove before the next restart.
	lost string
}

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

// startCluster writes the configuration of `split`, puts a proxy between every two processes, and starts all processes.
func startCluster(ctx context.Context, o options) (*cluster, error) {
	c := &cluster{dir: o.dir, watershed: o.watershed}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	plan := exec.CommandContext(ctx, o.watershed, "split", "--dry-run", "--data-dir", o.dir, "--bind-address",
		"127.0.0.1", "--secure-port", fmt.Sprint(c.port), "--replicas", o.replicas,
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
		switch command, _, _ := strings.Cut(name, "-"); command {
		case "watchfanout":
			conf["watch-progress-period"] = "1s"
			conf["watch-ring-bytes"] = "65536" // resumes from older revisions are replayed from the log
		case "gateway":
			conf["watch-bookmark-period"] = "2s"
		case "registry":
			conf["etcd-compaction-interval"] = "0s" // faults compact
		}
		b, err := yaml.Marshal(conf)
		if err != nil {
			return nil, err
		}
		path := filepath.Join(o.dir, "config", name+".yaml")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return nil, err
		}
		command, _, _ := strings.Cut(name, "-")
		data, _ := conf["data-dir"].(string)
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

// start runs the process, and restarts it whenever it ends.
func (p *process) start() {
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		for {
			err := p.once()
			p.mu.Lock()
			if p.stopped {
				p.mu.Unlock()
				return
			}
			if !p.endExpected {
				p.unexpectedEnds++
				log.Printf("%s ended by itself: %v", p.name, err)
			}
			p.endExpected = false
			down := max(p.down, 50*time.Millisecond)
			p.mu.Unlock()
			time.Sleep(down)
		}
	}()
}

func (p *process) once() error {
	out, err := os.OpenFile(filepath.Join(p.cluster.dir, p.name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	p.mu.Lock()
	lost := p.lost
	p.lost = ""
	p.mu.Unlock()
	if lost != "" {
		if err := os.RemoveAll(lost); err != nil {
			return err
		}
	}
	cmd := exec.Command(p.cluster.watershed, p.command, "--config", p.config)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return nil
	}
	err = cmd.Start()
	p.cmd = cmd
	p.mu.Unlock()
	if err != nil {
		return err
	}
	return cmd.Wait()
}

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(s)
	}
}

func (p *process) kill(down time.Duration) {
	p.mu.Lock()
	p.endExpected, p.down = true, down
	p.mu.Unlock()
	p.signal(syscall.SIGKILL)
}

func (p *process) stop() {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGKILL)
	if p.done != nil {
		<-p.done
	}
}

// fault is a fault and its duration.
type fault struct {
	kind     string
	target   int
	lasts    time.Duration
	pause    time.Duration
	together bool // the next fault begins before this fault ends
}

// faults generates all faults from the seed.
func (c *cluster) faults(o options) []fault {
	r := rand.New(rand.NewPCG(o.seed, 1))
	var all []fault
	for range o.faults {
		f := fault{
			lasts:    time.Duration(50+r.IntN(1500)) * time.Millisecond,
			pause:    time.Duration(100+r.IntN(700)) * time.Millisecond,
			together: r.IntN(3) == 0,
		}
		switch n := r.IntN(24); {
		case n == 23:
			f.kind = "lose the log"
		case n == 22: // the replicas' memory is lost while the log cannot be read
			f.kind, f.lasts = "blackout", time.Duration(2000+r.IntN(6000))*time.Millisecond
		case n == 20: // longer than replicas take to report that they are behind
			f.kind, f.lasts = "stall", time.Duration(2000+r.IntN(10000))*time.Millisecond
		case n == 21:
			f.kind, f.target = "corrupt", r.IntN(1<<20)
		case n < 8:
			f.kind, f.target = "kill", r.IntN(len(c.processes))
		case n < 13:
			f.kind, f.target = "pause", r.IntN(len(c.processes))
		case n < 15:
			f.kind, f.target = "term", r.IntN(len(c.processes))
		case n < 17:
			f.kind, f.target = "cut", r.IntN(len(c.links))
		case n < 19:
			f.kind, f.target = "hang", r.IntN(len(c.links))
		default:
			f.kind, f.target = "isolate", r.IntN(len(c.processes))
		}
		all = append(all, f)
	}
	return all
}

// calmEvery is the number of faults between pauses for the cluster to recover.
const calmEvery = 25

// inject injects the faults in order, and returns the number of faults of each kind.
func (c *cluster) inject(ctx context.Context, o options, progress func() string) map[string]int {
	counts := map[string]int{}
	var wg sync.WaitGroup
	for n, f := range c.faults(o) {
		if ctx.Err() != nil {
			break
		}
		counts[f.kind]++
		if f.together {
			wg.Go(func() { c.do(f) })
		} else {
			c.do(f)
		}
		time.Sleep(f.pause)
		if (n+1)%calmEvery == 0 {
			wg.Wait()
			time.Sleep(2 * time.Second)
			log.Printf("%d faults; %s", n+1, progress())
		}
	}
	wg.Wait()
	return counts
}

func (c *cluster) do(f fault) {
	switch f.kind {
	case "kill":
		c.processes[f.target].kill(f.lasts)
	case "term": // an orderly stop, as in a rolling restart
		p := c.processes[f.target]
		p.mu.Lock()
		p.endExpected, p.down = true, f.lasts
		p.mu.Unlock()
		p.signal(syscall.SIGTERM)
	case "pause":
		p := c.processes[f.target]
		p.signal(syscall.SIGSTOP)
		time.Sleep(2 * f.lasts)
		p.signal(syscall.SIGCONT)
	case "stall", "blackout": // all NATS servers are stopped but not dead
		if f.kind == "blackout" { // and the replicas restart
			for _, p := range c.processes {
				if strings.HasPrefix(p.name, "watchfanout-") {
					p.kill(0)
				}
			}
		}
		for _, s := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			for _, p := range c.processes {
				if strings.HasPrefix(p.name, "nats-") {
					p.signal(s)
				}
			}
			if s == syscall.SIGSTOP {
				time.Sleep(f.lasts)
			}
		}
	case "lose the log": // NATS restarts with an empty disk
		for _, p := range c.processes {
			if strings.HasPrefix(p.name, "nats-") {
				p.mu.Lock()
				p.lost = p.data
				p.mu.Unlock()
				p.kill(f.lasts)
			}
		}
	case "corrupt":
		c.corrupt(f.target)
	case "cut":
		c.links[f.target].set(refuse)
		time.Sleep(f.lasts)
		c.links[f.target].set(pass)
	case "hang": // packets are lost without a reset
		c.links[f.target].set(hang)
		time.Sleep(4 * f.lasts)
		c.links[f.target].set(pass)
	case "isolate":
		name := c.processes[f.target].name
		var mine []*link
		for _, l := range c.links {
			if l.from == name || l.to == name {
				mine = append(mine, l)
			}
		}
		for _, l := range mine {
			l.set(hang)
		}
		time.Sleep(2 * f.lasts)
		for _, l := range mine {
			l.set(pass)
		}
	}
}

// proxy forwards TCP connections, until set changes its mode.
//
//	pass: forwards bytes
//	refuse: closes every connection, also new connections
//	hang: keeps connections open and holds their bytes
type proxy struct {
	listener net.Listener
	to       string

	mu     sync.Mutex
	mode   mode
	change chan struct{}
	conns  map[net.Conn]bool
}

type mode int

const (
	pass mode = iota
	refuse
	hang
)

func newProxy(to string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, to: to, change: make(chan struct{}), conns: map[net.Conn]bool{}}
	go p.accept()
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	close(p.change)
	p.change = make(chan struct{})
	if m == refuse {
		for c := range p.conns {
			c.Close()
		}
	}
}

func (p *proxy) now() (mode, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode, p.change
}

func (p *proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		go p.serve(in)
	}
}

func (p *proxy) serve(in net.Conn) {
	defer in.Close()
	if m, _ := p.now(); m == refuse {
		return
	}
	out, err := net.DialTimeout("tcp", p.to, 2*time.Second)
	if err != nil {
		return
	}
	defer out.Close()
	p.mu.Lock()
	p.conns[in], p.conns[out] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.conns, in)
		delete(p.conns, out)
		p.mu.Unlock()
	}()
	var wg sync.WaitGroup
	for _, d := range [][2]net.Conn{{in, out}, {out, in}} {
		wg.Go(func() {
			defer in.Close()
			defer out.Close()
			p.copy(d[1], d[0])
		})
	}
	wg.Wait()
}

// copy forwards bytes. While the link hangs, it holds them.
func (p *proxy) copy(to io.Writer, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		for m, change := p.now(); m == hang; m, change = p.now() {
			<-change
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (p *proxy) close() {
	p.listener.Close()
	p.set(refuse)
}
