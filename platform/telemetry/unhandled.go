package telemetry

import (
	"context"
	"slices"
	"strings"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// logUnhandled is upstream's logger of errors that its libraries do not return.
var logUnhandled = utilruntime.ErrorHandlers[0]

// unhandled logs an error that a library does not return. It logs a response that was not written because the client
// disconnected at verbosity 4, because a client can cause any number of these errors.
func unhandled(ctx context.Context, err error, message string, keysAndValues ...any) {
	if err != nil && clientDisconnected(err.Error()) {
		klog.FromContext(ctx).V(4).Info("A client disconnected before its response was written", "error", err)
		return
	}
	logUnhandled(ctx, err, message, keysAndValues...)
}

// Upstream formats the errors of writes into text (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters).
// writeErrors are the beginnings of these texts. closedErrors are their ends if the connection or the stream is
// closed.
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
