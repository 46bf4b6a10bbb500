package h2writer

import (
	"slices"
	"sync"
)

// largeBuffer is the size of a full queue with frame headers, and of a write that began before it was full.
const largeBuffer = maxQueueBytes + maxQueueBytes/256 + 128<<10

// buffer is the memory of a queue. A connection holds a buffer only while its queue is not empty.
type buffer struct {
	data []byte
	pool *sync.Pool
}

// bufferSizes are the sizes of buffers, and buffers the pools of unused buffers of each size.
var (
	bufferSizes = [...]int{4 << 10, 16 << 10, 64 << 10, 256 << 10, largeBuffer}
	buffers     [len(bufferSizes)]sync.Pool
)

// grow makes space for n more bytes in the queue.
func (c *Conn) grow(n int) {
	need := len(c.queue) + n
	if need <= cap(c.queue) || need > largeBuffer {
		return
	}
	class := slices.IndexFunc(bufferSizes[:], func(size int) bool { return size >= need })
	b, ok := buffers[class].Get().(*buffer)
	if !ok {
		b = &buffer{make([]byte, 0, bufferSizes[class]), &buffers[class]}
	}
	c.queue = append(b.data, c.queue...)
	c.buffer.release()
	c.buffer = b
}

// release returns a buffer that no queue uses.
func (b *buffer) release() {
	if b != nil {
		b.pool.Put(b)
	}
}
