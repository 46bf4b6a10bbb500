// Package inspect reads the reports of the processes of a running Watershed: through a gateway, or from the debug
// addresses of this machine. It changes nothing, and starts no goroutine that lasts.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"watershed.dev/cmd/certgen"
	"watershed.dev/platform/process"
)

// DebugSocket is the debug socket of `up` in the data directory.
const DebugSocket = "debug.sock"

// Options select a running Watershed.
type Options struct {
	DataDir    string
	Addresses  []string
	Kubeconfig string
	Context    string

	flags *pflag.FlagSet
}

// AddFlags adds every option to fs.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.AddDataDirFlag(fs)
	fs.StringSliceVar(&o.Addresses, "addresses", nil,
		"The --debug-address of every process, as host:port or socket, instead of --data-dir.")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"Reads all processes through the gateway of this kubeconfig, whose user may get /metrics. Empty: the data "+
			"directory, or kubectl's kubeconfig if --data-dir is not set and no process runs there.")
	fs.StringVar(&o.Context, "context", "", "The context of the kubeconfig.")
}

// AddDataDirFlag adds --data-dir to fs.
func (o *Options) AddDataDirFlag(fs *pflag.FlagSet) {
	o.flags = fs
	fs.StringVar(&o.DataDir, "data-dir", ".watershed", "The directory of a running up or split.")
}

// timeout bounds a request, except for deep reports: their time is the gateway's.
const timeout = 10 * time.Second

// timeoutOf bounds a request for reports.
func timeoutOf(kind process.Kind) time.Duration {
	if kind == process.Deep {
		return process.DeepTimeout + timeout
	}
	return timeout
}

// ThroughGateway reports whether the processes are read through a gateway. kubectl's kubeconfig may be of another
// cluster, so a set or unreadable data directory excludes it.
func (o *Options) ThroughGateway() bool {
	if o.Kubeconfig != "" || o.Context != "" {
		return true
	}
	if len(o.Addresses) > 0 || o.flags != nil && o.flags.Changed("data-dir") {
		return false
	}
	if _, err := debugAddresses(o.DataDir); err == nil || errors.Is(err, fs.ErrPermission) {
		return false
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	return slices.ContainsFunc(rules.Precedence, func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	})
}

// Config returns the client configuration of the cluster: of the kubeconfig, or of the data directory's administrator.
func (o *Options) Config() (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.Kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: o.Context}
	throughGateway := o.ThroughGateway()
	if !throughGateway { // the user may have selected another cluster in the file
		rules.ExplicitPath = filepath.Join(o.DataDir, "admin.kubeconfig")
		overrides.CurrentContext = certgen.ClusterName
	}
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig()
	if err != nil && !throughGateway && len(o.Addresses) == 0 {
		if _, err := debugAddresses(o.DataDir); err != nil {
			return nil, err
		}
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", rules.ExplicitPath, err)
	}
	c.Timeout = timeout
	return c, nil
}

// Reports returns the report of every process, sorted by service. A process that does not respond has a report with an
// error.
func (o *Options) Reports(ctx context.Context, kind process.Kind) (all []*process.Report, err error) {
	if o.ThroughGateway() {
		all, err = o.fromGateway(ctx, kind)
	} else {
		all, err = o.fromDebugAddresses(ctx, kind)
	}
	slices.SortFunc(all, func(a, b *process.Report) int {
		if c := slices.Compare(a.Services, b.Services); c != 0 {
			return c
		}
		return strings.Compare(a.Address+a.Name(), b.Address+b.Name())
	})
	return all, err
}

// fromGateway returns the reports that a gateway collects.
func (o *Options) fromGateway(ctx context.Context, kind process.Kind) ([]*process.Report, error) {
	c, err := o.Config()
	if err != nil {
		return nil, err
	}
	c.Timeout = timeoutOf(kind)
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, err
	}
	defer client.CloseIdleConnections()
	base, _, err := rest.DefaultServerUrlFor(c)
	if err != nil {
		return nil, err
	}
	base.Path = strings.TrimSuffix(base.Path, "/") + "/metrics"
	base.RawQuery = url.Values{"view": {"processes"}, process.DeepQuery: {string(kind)}}.Encode()
	return get(ctx, client, base.String())
}

// errOlder means that a server has no reports.
var errOlder = errors.New("the server sends no reports of processes: it is kube-apiserver, or an older release of " +
	"Watershed; use --data-dir or --addresses")

func get(ctx context.Context, client *http.Client, target string) ([]*process.Report, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	sent := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return nil, fmt.Errorf("GET %s: %s: %s", req.URL.Path, resp.Status, strings.TrimSpace(string(body)))
	}
	if resp.Header.Get("Content-Type") != process.ReportsType {
		return nil, errOlder
	}
	var all []*process.Report
	if err := json.NewDecoder(resp.Body).Decode(&all); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errOlder
	}
	all[0].CompareClock(sent, time.Now()) // the process that responds has compared the others with itself
	return all, nil
}

// fromDebugAddresses returns the reports of the processes of this machine.
func (o *Options) fromDebugAddresses(ctx context.Context, kind process.Kind) ([]*process.Report, error) {
	targets := map[string][]string{}
	for _, a := range o.Addresses {
		targets[a] = nil
	}
	if len(o.Addresses) == 0 {
		var err error
		if targets, err = debugAddresses(o.DataDir); err != nil {
			return nil, err
		}
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []*process.Report
	for address, services := range targets {
		wg.Go(func() {
			client := DebugClient(address)
			client.Timeout = timeoutOf(kind)
			reports, err := get(ctx, client, "http://process/report?"+process.DeepQuery+"="+string(kind))
			if err != nil {
				services = append([]string{}, services...) // a list in JSON, also if the services are not known
				reports = []*process.Report{{Services: services, Address: address, Error: err.Error()}}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, reports...)
		})
	}
	wg.Wait()
	return process.WithPrograms(all), nil
}

// debugAddresses returns the services of each debug address of a data directory: the socket of `up`, or the
// addresses of the processes of `split`.
func debugAddresses(dir string) (map[string][]string, error) {
	if _, err := os.ReadDir(dir); errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("--data-dir %q: %w: run this as the user of `up` or `split`", dir, fs.ErrPermission)
	}
	sockets, err := process.SocketDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string][]string{}
	if socket := filepath.Join(sockets, DebugSocket); Reachable(socket) {
		all[socket] = nil
		return all, nil
	}
	files, _ := fs.Glob(os.DirFS(dir), "config/*.yaml")
	if !process.Locked(dir) { // the files are of an earlier split
		files = nil
	}
	for _, f := range files {
		f = filepath.Join(dir, f)
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var c struct {
			Address string   `json:"debug-address"`
			Targets []string `json:"target"`
		}
		if err := yaml.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		switch {
		case len(c.Targets) > 0:
			all[c.Address] = c.Targets
		case strings.HasPrefix(filepath.Base(f), "xds-"):
			all[c.Address] = []string{"xds"}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("--data-dir %q: no process runs in this directory; set the directory of `up` or "+
			"`split`, --addresses or --kubeconfig", dir)
	}
	return all, nil
}

// Reachable reports whether a process listens at a socket. It waits for a second at most.
func Reachable(socket string) bool {
	c, err := net.DialTimeout("unix", socket, time.Second)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// Printable returns a text without control characters except line feeds and tabs. Clients choose some of the text of
// reports, and a terminal would execute their control sequences.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// DebugClient returns a client of a debug address: a host and port or a socket. It ignores the host of a URL.
func DebugClient(target string) *http.Client {
	d := &net.Dialer{Timeout: time.Second}
	return &http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				if strings.Contains(target, "/") {
					return d.DialContext(ctx, "unix", target)
				}
				return d.DialContext(ctx, network, target)
			},
		},
	}
}
