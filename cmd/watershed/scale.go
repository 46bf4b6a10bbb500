package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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
	"watershed.dev/platform/process"
	"watershed.dev/platform/socket"
)

// controlSocket is the socket on which a running split accepts scale requests. Only the user that runs split may
// connect.
const controlSocket = "split.sock"

// maxScale is the maximal number of processes of a set on a machine.
const maxScale = 64

// scaleCommand changes the number of processes of services in a running split.
func scaleCommand(fs *pflag.FlagSet) func() error {
	dataDir := fs.String("data-dir", ".watershed", "The directory of the running split.")
	return func() error { return requestScale(*dataDir, fs.Args()) }
}

func requestScale(dataDir string, args []string) error {
	to := url.Values{}
	for _, a := range args {
		name, n, ok := strings.Cut(a, "=")
		if !ok {
			return fmt.Errorf("unknown argument %q: want name=number, as in watershed split scale watchfanout=4", a)
		}
		to.Set(name, n)
	}
	if len(to) == 0 {
		return errors.New("no service to scale: want name=number, as in watershed split scale watchfanout=4")
	}
	sockets, err := process.SocketDir(dataDir)
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
		return fmt.Errorf("--data-dir %q: no ready split runs in this directory: %w", dataDir, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK {
		return errors.Join(errors.New(strings.TrimSpace(string(body))), err)
	}
	fmt.Print(string(body))
	return err
}

// serveControl serves the requests of scaleCommand until ctx is done. After an error it only waits, because the
// processes do not need these requests.
func (s *splitRun) serveControl(ctx context.Context) {
	if err := s.control(ctx); err != nil {
		s.show.note(fmt.Sprintf("split scale is impossible until the next start: %v", err))
		<-ctx.Done()
	}
}

// control serves the requests of scaleCommand until ctx is done.
func (s *splitRun) control(ctx context.Context) error {
	l, err := socket.Listen(filepath.Join(s.sockets, controlSocket))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /scale", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		report, err := s.scaleAll(r.PostForm)
		if err != nil {
			http.Error(w, report+err.Error(), http.StatusBadRequest)
			return
		}
		fmt.Fprint(w, report)
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

// scaleAll changes the numbers of processes of sets, unless any number is invalid. It returns a line for each set that
// it has changed.
func (s *splitRun) scaleAll(to url.Values) (report string, err error) {
	numbers := map[string]int{}
	for name := range to {
		n, err := strconv.Atoi(to.Get(name))
		if !slices.ContainsFunc(s.sets, func(set set) bool { return set.name == name }) || err != nil ||
			n < 1 || n > maxScale {
			var names []string
			for _, set := range s.sets {
				names = append(names, set.name)
			}
			return "", fmt.Errorf("%s=%s: want a name (%s) and a number from 1 to %d", name, to.Get(name),
				strings.Join(names, ", "), maxScale)
		}
		numbers[name] = n
	}
	for _, set := range s.sets {
		n, ok := numbers[set.name]
		if !ok {
			continue
		}
		if err := s.scale(set, n); err != nil {
			return report, err
		}
		report += fmt.Sprintf("%s: %d\n", set.name, n)
	}
	return report, nil
}

// scale changes the number of a set's processes. A new process is published just before its start, and receives calls
// once its health is SERVING. A removed process is first removed from the replicas file. It is stopped after
// propagationDelay: it then reports NOT_SERVING and finishes its calls.
func (s *splitRun) scale(set set, n int) error {
	s.scaling.Lock()
	defer s.scaling.Unlock()
	for {
		done, err := s.step(set, n)
		if done || err != nil {
			return err
		}
	}
}

// step adds or removes one process of a set. It does not wait while it holds the lock.
func (s *splitRun) step(set set, n int) (done bool, err error) {
	s.mu.Lock()
	switch count := s.counts[set.name]; {
	case count < n:
		err = s.scaleUp(set)
	case count > n:
		s.removed, err = s.scaleDown(set)
	default:
		done = true
	}
	removed := s.removed
	s.mu.Unlock()
	if removed != nil {
		time.Sleep(propagationDelay)
		removed.stop()
		err = errors.Join(err, os.Remove(removed.config))
		s.mu.Lock()
		s.removed = nil
		s.mu.Unlock()
	}
	return done, err
}

func (s *splitRun) scaleUp(set set) error {
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	n := s.counts[set.name]
	before := maps.Clone(s.addresses)
	s.addAddress(set, s.rpcAddress(set.name, n, fmt.Sprintf("127.0.0.1:%d", ports[0])))
	p, err := s.planSet(set, n)
	if err == nil {
		err = s.writeReplicas()
	}
	if err != nil {
		s.addresses = before
		return err
	}
	s.counts[set.name]++
	s.processes = append(s.processes, p)
	p.start(s.spawn)
	return nil
}

// scaleDown removes a set's last process from the replicas file and from the processes. The caller must stop the
// returned process.
func (s *splitRun) scaleDown(set set) (*child, error) {
	left := s.counts[set.name] - 1
	before := maps.Clone(s.addresses)
	for _, service := range newProcess(set.targets).Exposed() {
		s.addresses[service] = before[service][:left:left]
	}
	if err := s.writeReplicas(); err != nil {
		s.addresses = before
		return nil, err
	}
	s.counts[set.name] = left
	last := fmt.Sprintf("%s-%d", set.name, left)
	i := slices.IndexFunc(s.processes, func(p *child) bool { return p.name == last })
	p := s.processes[i]
	s.processes = slices.Delete(s.processes, i, i+1)
	return p, nil
}
