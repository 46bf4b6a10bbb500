// Package reload reads files anew while a process runs. What a file said before stays in force until what it says now
// is known to be good.
package reload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/util/filesystem"
	"k8s.io/component-base/metrics/legacyregistry"
)

const (
	// period is how often a file is looked at where nothing tells of its changes.
	period = time.Minute
	// settle is how long a file must be the same before it is believed to be whole.
	settle = 50 * time.Millisecond
	// retry is how long to wait before what may become better is tried again.
	retry = 5 * time.Second
)

var (
	reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_file_reloads_total",
		Help: "Times that a file which a flag names was read anew, by both and whether it was put in force.",
	}, []string{"flag", "file", "result"})
	refused = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_file_refused",
		Help: "1 while what a file says is not in force because it is bad, by the flag that names it and its path.",
	}, []string{"flag", "file"})
)

// Several services of a process may read files anew: they share the registry of Kubernetes' libraries.
func init() { legacyregistry.RawMustRegister(reloads, refused) }

// Files are the files that a service reads anew. Add them before Run; every other method may be called by any number of
// goroutines.
type Files struct{ all []*file }

type file struct {
	flag, path string
	apply      Apply

	mu sync.Mutex
	// inForce is what was applied last, seen what was read last.
	inForce, seen []byte
	since         time.Time
	err           error
}

// Apply puts a file's new contents in force, or says why they are bad and leaves everything as it was. An error of
// MayRecover is tried again; any other stands until the contents change.
type Apply func(ctx context.Context, data []byte) error

// MayRecover says of an error that the same contents may be good later: another server did not answer.
func MayRecover(err error) error { return mayRecover{err} }

type mayRecover struct{ error }

func (m mayRecover) Unwrap() error { return m.error }

// Add has a file followed which the flag names; data is what it said at the start. An empty path is no file.
func (f *Files) Add(flag, path string, data []byte, apply Apply) {
	if path == "" {
		return
	}
	f.all = append(f.all, &file{flag: flag, path: path, apply: apply, inForce: data, seen: data, since: time.Now()})
	refused.WithLabelValues(flag, path).Set(0)
}

// Follow has a file followed whose contents now are in force. An empty path is no file.
func (f *Files) Follow(flag, path string, apply Apply) error {
	_, err := f.read(flag, path, apply)
	return err
}

// Take puts in force what a file says, now and whenever it changes. An empty path is no file. Its error names the flag.
func (f *Files) Take(ctx context.Context, flag, path string, apply Apply) error {
	data, err := f.read(flag, path, apply)
	if err != nil || path == "" {
		return err
	}
	if err := apply(ctx, data); err != nil {
		return fmt.Errorf("--%s %q: %w", flag, path, err)
	}
	return nil
}

func (f *Files) read(flag, path string, apply Apply) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--%s %q: %w", flag, path, err)
	}
	f.Add(flag, path, data, apply)
	return data, nil
}

// Run follows the files until ctx is done.
func (f *Files) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, one := range f.all {
		wg.Go(func() {
			filesystem.WatchUntil(ctx, period, one.path, func() { one.follow(ctx) }, func(err error) {
				slog.Warn("A file's changes are not told; it is looked at now and then", "flag", "--"+one.flag,
					"file", one.path, "every", period, "error", err)
			})
		})
	}
	wg.Wait()
}

// follow reads the file until what it says is decided.
func (f *file) follow(ctx context.Context) {
	for ctx.Err() == nil {
		if err := f.reload(ctx); !errors.As(err, new(mayRecover)) {
			return
		}
		wait(ctx, retry)
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// reload reads the file once it rests, and applies what it says if that is new.
func (f *file) reload(ctx context.Context) error {
	data, err := f.settled(ctx)
	if err == nil && bytes.Equal(data, f.lastSeen()) {
		f.unchanged(data)
		return nil
	}
	if err == nil {
		err = f.apply(ctx, data)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	told := f.err != nil && err != nil && f.err.Error() == err.Error()
	if f.err = err; err != nil {
		if data != nil && !errors.As(err, new(mayRecover)) {
			f.seen = data
		}
		refused.WithLabelValues(f.flag, f.path).Set(1)
		reloads.WithLabelValues(f.flag, f.path, "refused").Inc()
		if !told {
			slog.Error("A file was not read anew; what was read before stays in force", "flag", "--"+f.flag, "file",
				f.path, "error", err)
		}
		return err
	}
	f.inForce, f.seen, f.since = data, data, time.Now()
	refused.WithLabelValues(f.flag, f.path).Set(0)
	reloads.WithLabelValues(f.flag, f.path, "applied").Inc()
	slog.Info("A file was read anew", "flag", "--"+f.flag, "file", f.path)
	return nil
}

// unchanged forgets that the file could not be read, where it is again as what is in force.
func (f *file) unchanged(data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if bytes.Equal(data, f.inForce) {
		f.err = nil
		refused.WithLabelValues(f.flag, f.path).Set(0)
	}
}

// lastSeen is what was decided about last.
func (f *file) lastSeen() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

// settled is what the file says once it says the same twice: whoever writes it in place is then done.
func (f *file) settled(ctx context.Context) ([]byte, error) {
	data, err := os.ReadFile(f.path)
	for err == nil && !bytes.Equal(data, f.lastSeen()) && ctx.Err() == nil {
		wait(ctx, settle)
		var again []byte
		if again, err = os.ReadFile(f.path); bytes.Equal(data, again) {
			break
		}
		data = again
	}
	return data, err
}

// ServeHTTP shows, a line for each file, what is in force and why what lies there is not.
func (f *Files) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	for _, one := range f.all {
		one.mu.Lock()
		if one.err != nil {
			fmt.Fprintf(w, "[-]%s %s refused: %v; in force is what was read %s\n", one.flag, one.path, one.err,
				one.since.UTC().Format(time.RFC3339))
		} else {
			fmt.Fprintf(w, "[+]%s %s in force since %s\n", one.flag, one.path, one.since.UTC().Format(time.RFC3339))
		}
		one.mu.Unlock()
	}
}
