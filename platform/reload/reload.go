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
	// pollPeriod is how often a file is looked at where nothing tells of its changes.
	pollPeriod = time.Minute
	// settleDelay is how long a file must be the same before it is believed to be whole.
	settleDelay = 50 * time.Millisecond
	// retryDelay is how long to wait before what may become better is tried again.
	retryDelay = 5 * time.Second
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
	update     UpdateFunc

	mu sync.Mutex
	// active is what was applied last, seen what was read last.
	active, seen []byte
	since        time.Time
	err          error
}

// UpdateFunc puts a file's new contents in force, or says why they are bad and leaves everything as it was. An error of
// Retryable is tried again; any other stands until the contents change.
type UpdateFunc func(ctx context.Context, data []byte) error

// Retryable says of an error that the same contents may be good later: another server did not answer.
func Retryable(err error) error { return retryable{err} }

type retryable struct{ error }

func (m retryable) Unwrap() error { return m.error }

// Add has a file followed which the flag names; data is what it said at the start. An empty path is no file.
func (f *Files) Add(flag, path string, data []byte, update UpdateFunc) {
	if path == "" {
		return
	}
	f.all = append(f.all, &file{flag: flag, path: path, update: update, active: data, seen: data, since: time.Now()})
	refused.WithLabelValues(flag, path).Set(0)
}

// Watch has a file followed whose contents now are in force. An empty path is no file.
func (f *Files) Watch(flag, path string, update UpdateFunc) error {
	_, err := f.read(flag, path, update)
	return err
}

// LoadAndWatch puts in force what a file says, now and whenever it changes. An empty path is no file. Its error names the flag.
func (f *Files) LoadAndWatch(ctx context.Context, flag, path string, update UpdateFunc) error {
	data, err := f.read(flag, path, update)
	if err != nil || path == "" {
		return err
	}
	if err := update(ctx, data); err != nil {
		return fmt.Errorf("--%s %q: %w", flag, path, err)
	}
	return nil
}

func (f *Files) read(flag, path string, update UpdateFunc) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--%s %q: %w", flag, path, err)
	}
	f.Add(flag, path, data, update)
	return data, nil
}

// Run follows the files until ctx is done.
func (f *Files) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, file := range f.all {
		wg.Go(func() {
			filesystem.WatchUntil(ctx, pollPeriod, file.path, func() { file.watch(ctx) }, func(err error) {
				slog.Warn("A file's changes are not told; it is looked at now and then", "flag", "--"+file.flag,
					"file", file.path, "every", pollPeriod, "error", err)
			})
		})
	}
	wg.Wait()
}

// watch reads the file until what it says is decided.
func (f *file) watch(ctx context.Context) {
	for ctx.Err() == nil {
		if err := f.reload(ctx); !errors.As(err, new(retryable)) {
			return
		}
		wait(ctx, retryDelay)
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
	data, err := f.readStable(ctx)
	if err == nil && bytes.Equal(data, f.lastSeen()) {
		f.unchanged(data)
		return nil
	}
	if err == nil {
		err = f.update(ctx, data)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	reported := f.err != nil && err != nil && f.err.Error() == err.Error()
	if f.err = err; err != nil {
		if data != nil && !errors.As(err, new(retryable)) {
			f.seen = data
		}
		refused.WithLabelValues(f.flag, f.path).Set(1)
		reloads.WithLabelValues(f.flag, f.path, "refused").Inc()
		if !reported {
			slog.Error("A file was not read anew; what was read before stays in force", "flag", "--"+f.flag, "file",
				f.path, "error", err)
		}
		return err
	}
	f.active, f.seen, f.since = data, data, time.Now()
	refused.WithLabelValues(f.flag, f.path).Set(0)
	reloads.WithLabelValues(f.flag, f.path, "applied").Inc()
	slog.Info("A file was read anew", "flag", "--"+f.flag, "file", f.path)
	return nil
}

// unchanged forgets that the file could not be read, where it is again as what is in force.
func (f *file) unchanged(data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if bytes.Equal(data, f.active) {
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

// readStable is what the file says once it says the same twice: whoever writes it in place is then done.
func (f *file) readStable(ctx context.Context) ([]byte, error) {
	data, err := os.ReadFile(f.path)
	for err == nil && !bytes.Equal(data, f.lastSeen()) && ctx.Err() == nil {
		wait(ctx, settleDelay)
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
	for _, file := range f.all {
		file.mu.Lock()
		if file.err != nil {
			fmt.Fprintf(w, "[-]%s %s refused: %v; in force is what was read %s\n", file.flag, file.path, file.err,
				file.since.UTC().Format(time.RFC3339))
		} else {
			fmt.Fprintf(w, "[+]%s %s in force since %s\n", file.flag, file.path, file.since.UTC().Format(time.RFC3339))
		}
		file.mu.Unlock()
	}
}
