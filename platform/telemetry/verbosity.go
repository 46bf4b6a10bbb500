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

// verbosity is the verbosity of this process's logs.
var verbosity atomic.Int64

// level is the level of a handler that also passes the lines of --vmodule.
type level struct{ modules int }

// Level implements slog.Leveler.
func (l level) Level() slog.Level { return -slog.Level(max(verbosity.Load(), int64(l.modules))) }

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
