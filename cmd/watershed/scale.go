package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/cmd/xds"
	"watershed.dev/platform/config"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// controlSocket is the socket on which a running split accepts scale requests. Only the user that runs split may
// connect.
const controlSocket = "split.sock"

// maxScale is the maximal number of processes of one service on a machine.
const maxScale = 64

// scaleCommand changes the number of processes of services in a running split.
func scaleCommand(args []string) error {
	fs := pflag.NewFlagSet("watershed split scale", pflag.ContinueOnError)
	dataDir := fs.String("data-dir", ".watershed", "The directory of the running split.")
	to, flags := url.Values{}, []string{}
	for _, a := range args {
		if name, n, ok := strings.Cut(a, "="); ok && !strings.HasPrefix(a, "-") {
			to.Set(name, n)
			continue
		}
		flags = append(flags, a)
	}
	if err := config.Load(fs, flags); err != nil {
		return process.ExitOnHelp(err)
	}
	if len(to) == 0 {
		return errors.New("no service to scale: want service=number, as in watershed split scale watchfanout=4")
	}
	dir, err := filepath.Abs(*dataDir)
	if err != nil {
		return err
	}
	sockets, err := process.SocketDir(dir)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(sockets, controlSocket))
		},
	}}
	resp, err := client.PostForm("http://split/scale", to)
	if err != nil {
		return fmt.Errorf("--data-dir %q: no ready split runs in this directory: %w", *dataDir, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		return errors.Join(errors.New(strings.TrimSpace(string(body))), err)
	}
	fmt.Print(string(body))
	return err
}

// serveControl serves the requests of scaleCommand until ctx is done.
func (s *splitRun) serveControl(ctx context.Context) error {
	l, err := rpc.ListenSocket(filepath.Join(s.sockets, controlSocket))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /scale", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		for name := range r.PostForm {
			if err := s.scale(name, r.PostForm.Get(name)); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			fmt.Fprintf(w, "%s: %s\n", name, r.PostForm.Get(name))
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { srv.Close() })()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// propagationDelay is the time until all processes have received a change of the replicas file.
const propagationDelay = 2 * xds.FilePeriod

// scale changes the number of a service's processes. A new process is published after its start, and receives calls
// once its health is SERVING. A removed process is first removed from the replicas file. It is stopped after
// propagationDelay: it then reports NOT_SERVING and finishes its calls.
func (s *splitRun) scale(name, number string) error {
	m := moduleOf(name)
	n, err := strconv.Atoi(number)
	if m == nil || err != nil || n < 1 || n > maxScale {
		return fmt.Errorf("%s=%s: want a service (%s) and a number from 1 to %d", name, number,
			strings.Join(moduleNames(), ", "), maxScale)
	}
	s.scaling.Lock()
	defer s.scaling.Unlock()
	for {
		done, err := s.step(m, n)
		if done || err != nil {
			return err
		}
	}
}

// step adds or removes one process of a service. It does not wait while it holds the lock.
func (s *splitRun) step(m *process.Module, n int) (done bool, err error) {
	s.mu.Lock()
	var removed *child
	switch count := s.counts[m.Name]; {
	case count < n:
		err = s.scaleUp(m)
	case count > n:
		removed, err = s.scaleDown(m)
	default:
		done = true
	}
	s.mu.Unlock()
	if removed != nil {
		time.Sleep(propagationDelay)
		removed.stop()
		err = errors.Join(err, os.Remove(removed.config))
	}
	return done, err
}

func (s *splitRun) scaleUp(m *process.Module) error {
	address := ""
	if m.ServesRPC {
		ports, err := freePorts(1)
		if err != nil {
			return err
		}
		address = s.rpcAddress(m.Name, s.counts[m.Name], fmt.Sprintf("127.0.0.1:%d", ports[0]))
	}
	p, err := s.planService(m, s.counts[m.Name], address)
	if err != nil {
		return err
	}
	if m.ServesRPC {
		s.addresses[m.Name] = append(s.addresses[m.Name], address)
	}
	s.counts[m.Name]++
	s.processes = append(s.processes, p)
	p.start(s.spawn)
	return s.writeReplicas()
}

// scaleDown removes a service's last process from the replicas file and from the processes. The caller must stop the
// returned process.
func (s *splitRun) scaleDown(m *process.Module) (*child, error) {
	left := s.counts[m.Name] - 1
	before := s.addresses[m.Name]
	if m.ServesRPC {
		s.addresses[m.Name] = before[:left:left]
	}
	if err := s.writeReplicas(); err != nil {
		s.addresses[m.Name] = before
		return nil, err
	}
	s.counts[m.Name] = left
	last := fmt.Sprintf("%s-%d", m.Name, left)
	i := slices.IndexFunc(s.processes, func(p *child) bool { return p.name == last })
	p := s.processes[i]
	s.processes = slices.Delete(s.processes, i, i+1)
	return p, nil
}
