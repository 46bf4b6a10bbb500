// Package reload reloads files while a process runs. The previous content of a file stays active until the new content
// is valid. The package does not parse files: an UpdateFunc does.
//
// Files.Run owns a goroutine per file, which calls the file's UpdateFunc.
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
	// pollPeriod is how often a file is checked without a notification of a change.
	pollPeriod = time.Minute
	// settleDelay is how long the content of a file must not change before it counts as complete.
	settleDelay = 50 * time.Millisecond
	// retryDelay is the delay before an update is tried again after a Retryable error.
	retryDelay = 5 * time.Second
)

var (
	reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_file_reloads_total",
		Help: "Reloads of files that flags name, by flag, file and result.",
	}, []string{"flag", "file", "result"})
	refused = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_file_refused",
		Help: "1 while a file's content is invalid and its previous content is active, by flag and path.",
	}, []string{"flag", "file"})
)

// Several services of a process may reload files. They share the registry of Kubernetes' libraries.
func init() { legacyregistry.RawMustRegister(reloads, refused) }

// Files are the files that a service reloads. Call Add, Watch and LoadAndWatch before Run. Other methods are safe for
// concurrent use.
type Files struct{ all []*file }

// file is a file that is reloaded.
//
//	active  --new content, update succeeds--> active
//	active  --read or update fails----------> refused: the previous content stays active
//	refused --valid or active content-------> active
type file struct {
	flag, path string
	update     UpdateFunc

	mu sync.Mutex
	// active is the content that update last accepted. seen is the content that update last accepted or rejected.
	active, seen []byte
	since        time.Time
	err          error
}

// UpdateFunc makes a file's new content active, or returns an error and changes nothing. After a Retryable error it is
// called again. After another error it is not called until the content changes.
type UpdateFunc func(ctx context.Context, data []byte) error

// Retryable marks an error after which the same content may be valid later, because another server did not respond,
// for example.
func Retryable(err error) error { return retryable{err} }

type retryable struct{ error }

func (m retryable) Unwrap() error { return m.error }

// Add watches the file that the flag names. data is its content at the start. Add ignores an empty path.
func (f *Files) Add(flag, path string, data []byte, update UpdateFunc) {
	if path == "" {
		return
	}
	f.all = append(f.all, &file{flag: flag, path: path, update: update, active: data, seen: data, since: time.Now()})
	refused.WithLabelValues(flag, path).Set(0)
}

// Watch reads a file and watches it. The content that it reads is already active. Watch ignores an empty path.
func (f *Files) Watch(flag, path string, update UpdateFunc) error {
	_, err := f.read(flag, path, update)
	return err
}

// LoadAndWatch calls update with a file's content, now and after every change. It ignores an empty path. Its error
// names the flag.
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

// Run watches the files until ctx is done.
func (f *Files) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, file := range f.all {
		wg.Go(func() {
			filesystem.WatchUntil(ctx, pollPeriod, file.path, func() { file.watch(ctx) }, func(err error) {
				slog.Warn("A file cannot be watched; it is polled", "flag", "--"+file.flag,
					"file", file.path, "every", pollPeriod, "error", err)
			})
		})
	}
	wg.Wait()
}

// watch reloads the file until update accepts or rejects the content.
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

// reload reads the file once it is complete, and calls update if the content is new.
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
			slog.Error("A file was not reloaded; its previous content stays active", "flag", "--"+f.flag, "file",
				f.path, "error", err)
		}
		return err
	}
	f.active, f.seen, f.since = data, data, time.Now()
	refused.WithLabelValues(f.flag, f.path).Set(0)
	reloads.WithLabelValues(f.flag, f.path, "applied").Inc()
	slog.Info("A file was reloaded", "flag", "--"+f.flag, "file", f.path)
	return nil
}

// unchanged clears the file's error if the file has the active content again.
func (f *file) unchanged(data []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if bytes.Equal(data, f.active) {
		f.err = nil
		refused.WithLabelValues(f.flag, f.path).Set(0)
	}
}

// lastSeen returns the content that update last accepted or rejected.
func (f *file) lastSeen() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen
}

// readStable returns the content once two reads in a row are equal, because another process may be writing the file in
// place.
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

// ServeHTTP writes a line per file: since when its content is active, and why newer content was refused.
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
