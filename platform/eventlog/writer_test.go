package eventlog

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A reader decodes the message of an event of any size. A large event is compressed once, although its compressed form
// would shrink again.
func TestAnEventIsCompressedOnce(t *testing.T) {
	var numbers strings.Builder
	for n := range 10000 {
		fmt.Fprintf(&numbers, "%v,", float64(n&0x3ff|1)/16777216)
	}
	for size := 1; size <= numbers.Len(); size += size/2 + 1 {
		e := &logv1.Event{
			Type:            logv1.Type_TYPE_ADDED,
			Revision:        5,
			StorageResource: "configmaps",
			Object:          &logv1.Object{Json: []byte(numbers.String()[:size])},
		}
		m, err := Message(e)
		if err != nil {
			t.Fatal(err)
		}
		sent := (&Writer{open: []core.LogEntry{{Event: e, Payload: m}}}).batch()
		got, err := decode(sent.Header.Get(encodingHeader), sent.Data)
		if err != nil || len(got) != 1 || !proto.Equal(got[0], e) {
			t.Errorf("%d bytes, %d in the message: %v", size, len(sent.Data), err)
		}
	}
}
