package rpc

import (
	"runtime"
	"sync"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// Held is a message that notifies its sender when no transport holds its bytes. Send it with SendMsg.
type Held struct {
	proto.Message
	*release
}

// release calls a function once: when Release is called, or when nothing refers to the release.
type release struct{ done func() }

// Hold returns m as a Held. released is called once: when gRPC has written or dropped the bytes, when a service of
// this process has received m, or by Release. If a connection breaks, gRPC drops the bytes without notice. released is
// then called after the next garbage collection.
func Hold(m proto.Message, released func()) *Held {
	r := &release{sync.OnceFunc(released)}
	runtime.AddCleanup(r, func(done func()) { done() }, r.done)
	return &Held{m, r}
}

// Release reports that no transport accepted the message.
func (r *release) Release() { r.done() }

// end returns the last buffer of the encoded message. It is empty, and calls Release when it is freed. It refers to no
// part of the message.
func (r *release) end() mem.Buffer {
	data := counted[:0]
	return mem.NewBuffer(&data, doneFunc(r.Release))
}
