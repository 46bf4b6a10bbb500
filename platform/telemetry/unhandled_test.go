package telemetry

import "testing"

// A response that was not written because its client disconnected is not an error. Any other failure is an error.
func TestDisconnectedClientsAreNoError(t *testing.T) {
	const unable = "apiserver was unable to write a "
	const received = "apiserver received an error that is not an metav1.Status: &errors.errorString{s:\"x\"}: "
	for text, left := range map[string]bool{
		unable + "JSON response: write tcp 127.0.0.1:1->127.0.0.1:2: write: broken pipe": true,
		unable + "fallback JSON response: http2: stream closed":                          true,
		received + "context canceled":                                                    true,
		received + "http: Handler timeout":                                               true,
		unable + "JSON response: json: unsupported type":                                 false,
		"failed to list *v1.Pod: dial tcp 127.0.0.1:1: connect: connection refused":      false,
		"some controller: context canceled":                                              false,
	} {
		if clientDisconnected(text) != left {
			t.Errorf("%q: %v", text, !left)
		}
	}
}
