package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/process"
	"watershed.dev/services/watchfanout"
)

// debugSocket is the debug socket of `up` in the data directory.
const debugSocket = "debug.sock"

// statusCommand prints the state of the watch cache of a running Watershed, by replica and by resource.
func statusCommand(fs *pflag.FlagSet) func() error {
	dataDir := fs.String("data-dir", ".watershed", "The directory of a running up or split.")
	addresses := fs.StringSlice("addresses", nil,
		"The --debug-address of every watchfanout replica, as host:port or socket, instead of --data-dir.")
	every := fs.Duration("watch", 0, "The interval between repeated outputs. 0: print once.")
	return func() error {
		targets := *addresses
		if len(targets) == 0 {
			var err error
			if targets, err = replicaAddresses(*dataDir); err != nil {
				return err
			}
		}
		return showStatus(targets, *every)
	}
}

// showStatus prints the state of the replicas once, or at an interval.
func showStatus(targets []string, every time.Duration) error {
	for {
		var out strings.Builder
		reached := showTier(&out, targets)
		if every <= 0 {
			fmt.Print(out.String())
			if !reached {
				return errors.New("no watchfanout replica responds")
			}
			return nil
		}
		fmt.Print("\033[H\033[2J", time.Now().Format(time.TimeOnly), "\n", out.String())
		time.Sleep(every)
	}
}

// replicaAddresses returns the debug addresses of a data directory: that of `up`, or those of the processes of `split`.
func replicaAddresses(dir string) ([]string, error) {
	sockets, err := process.SocketDir(dir)
	if err != nil {
		return nil, err
	}
	if socket := filepath.Join(sockets, debugSocket); reachable(socket) {
		return []string{socket}, nil
	}
	files, _ := filepath.Glob(filepath.Join(dir, "config", "*.yaml"))
	var all []string
	for _, f := range files {
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
		if slices.Contains(c.Targets, "watchfanout") {
			all = append(all, c.Address)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("--data-dir %q: no process runs in this directory; set the directory of `up` or "+
			"`split`, or --addresses", dir)
	}
	return all, nil
}

func reachable(socket string) bool {
	c, err := net.DialTimeout("unix", socket, time.Second)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// debugClient returns a client of a debug address: a host and port or a socket. It ignores the host of a URL.
func debugClient(target string) *http.Client {
	d := &net.Dialer{Timeout: time.Second}
	return &http.Client{
		Timeout: 3 * time.Second,
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

// statusOf returns the state of a replica with a debug address.
func statusOf(target string) (*watchfanout.Status, error) {
	req, err := http.NewRequest(http.MethodGet, "http://replica/", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := debugClient(target).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	st := &watchfanout.Status{}
	return st, json.NewDecoder(resp.Body).Decode(st)
}

// replicaName returns the displayed name of a replica: its host and port, or the name of its socket.
func replicaName(target string) string { return strings.TrimSuffix(filepath.Base(target), ".sock") }

// showTier writes the state of every replica and their totals by resource. It returns true if any replica responded.
func showTier(w io.Writer, targets []string) bool {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	defer t.Flush()
	type held struct{ replicas, objects, bytes, events, watches int }
	resources := map[string]*held{}
	var slow []string
	reached := false
	fmt.Fprintln(t, "REPLICA\tREADY\tREVISION\tBEHIND\tLAG\tSTREAMS\tEVENTS/S\tMEMORY\tRESETS")
	for _, target := range targets {
		st, err := statusOf(target)
		if err != nil {
			fmt.Fprintf(t, "%s\tno response\t\t\t\t\t\t\t\n", replicaName(target))
			continue
		}
		reached = true
		fmt.Fprintf(t, "%s\t%v\t%d\t%s\t%.1f ms\t%d\t%.0f\t%s\t%d\n", replicaName(target), st.Ready, st.Revision,
			behind(st.Behind), st.LagMilliseconds, st.Watches, st.EventsPerSecond, megabytes(st.Bytes), st.Resets)
		for _, r := range st.Resources {
			h := resources[r.Name]
			if h == nil {
				h = &held{}
				resources[r.Name] = h
			}
			h.watches += r.Watches
			h.bytes += r.Bytes + r.EventBytes
			h.events = max(h.events, r.Events)
			if r.Loaded {
				h.replicas++
				h.objects = max(h.objects, r.Objects)
			}
		}
		for _, s := range st.Slowest {
			slow = append(slow, fmt.Sprintf("%s\t%s\t%d\t%d\t%s",
				s.Resource, replicaName(target), s.Waiting, s.Revision, s.Query))
		}
	}
	var names []string
	for n, h := range resources {
		if h.replicas+h.watches > 0 {
			names = append(names, n)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(resources[b].bytes, resources[a].bytes), strings.Compare(a, b))
	})
	fmt.Fprintln(t, "\nRESOURCE\tREPLICAS\tOBJECTS\tRECENT EVENTS\tMEMORY\tSTREAMS")
	for _, n := range names {
		h := resources[n]
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%d\n", n, h.replicas, h.objects, h.events, megabytes(h.bytes), h.watches)
	}
	if len(slow) > 0 {
		fmt.Fprintln(t, "\nSLOWEST STREAMS\tREPLICA\tWAITING\tREVISION\tQUERY")
		for _, s := range slow {
			fmt.Fprintln(t, s)
		}
	}
	return reached
}

func behind(n int64) string {
	if n < 0 {
		return "?"
	}
	return fmt.Sprint(n)
}

func megabytes(n int) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
