package telemetry

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync/atomic"

	"k8s.io/component-base/logs"
)

// verbosity is the verbosity of this process's logs, and moduleVerbosity the highest verbosity of --vmodule.
var verbosity, moduleVerbosity atomic.Int64

// Verbose reports if the logs may have lines of a verbosity: by -v, or of any file by --vmodule. Unlike klog.V, it
// allocates nothing.
func Verbose(v int64) bool { return verbosity.Load() >= v || moduleVerbosity.Load() >= v }

// level is the level of a handler that also passes the lines of --vmodule.
type level struct{}

// Level implements slog.Leveler.
func (level) Level() slog.Level { return -slog.Level(max(verbosity.Load(), moduleVerbosity.Load())) }

// SetVerbosity sets the verbosity of this process's logs while it runs. It returns kube-apiserver's response
// (k8s.io/component-base/logs, GlogSetter).
func SetVerbosity(text string) (response string, err error) {
	v, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return "", err
	}
	if response, err = logs.GlogSetter(text); err == nil {
		verbosity.Store(int64(v))
	}
	return response, err
}

// maxVerbosityBytes bounds the body of putVerbosity.
const maxVerbosityBytes = 64

// putVerbosity sets the verbosity to the request's body.
func putVerbosity(w http.ResponseWriter, req *http.Request) {
	text, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxVerbosityBytes))
	var response string
	if err == nil {
		response, err = SetVerbosity(string(text))
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	fmt.Fprintln(w, response)
}
