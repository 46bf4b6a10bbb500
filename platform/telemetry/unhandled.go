package telemetry

import (
	"context"
	"slices"
	"strings"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// logUnhandled is upstream's logger of the errors that its libraries do not return.
var logUnhandled = utilruntime.ErrorHandlers[0]

// unhandled logs such an error. It logs at verbosity 4 that an answer could not be written because the client has left:
// a client can cause any number of these.
func unhandled(ctx context.Context, err error, message string, keysAndValues ...any) {
	if err != nil && clientDisconnected(err.Error()) {
		klog.FromContext(ctx).V(4).Info("A client left before it had its answer", "error", err)
		return
	}
	logUnhandled(ctx, err, message, keysAndValues...)
}

// Upstream formats the errors of writes into text (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters). These are
// how the texts begin, and how they end where the connection or the stream is closed.
var (
	writeErrors = []string{
		"apiserver was unable to write a ",
		"apiserver received an error that is not an metav1.Status: ",
	}
	closedErrors = []string{
		": broken pipe",
		": connection reset by peer",
		": use of closed network connection",
		"http2: stream closed",
		"client disconnected",
		"http: Handler timeout",
		"context canceled",
	}
)

func clientDisconnected(text string) bool {
	return slices.ContainsFunc(writeErrors, func(begin string) bool { return strings.HasPrefix(text, begin) }) &&
		slices.ContainsFunc(closedErrors, func(end string) bool { return strings.HasSuffix(text, end) })
}
