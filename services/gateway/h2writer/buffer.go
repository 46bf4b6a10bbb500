package h2writer

import (
	"slices"
	"sync"
	"sync/atomic"
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

// bufferedBytes is the size of the buffers that queues and writes to sockets use, in all connections.
var bufferedBytes atomic.Int64

// queueLimit returns how many bytes may wait for a connection's socket now.
func queueLimit() int {
	if bufferedBytes.Load() > maxBufferedBytes {
		return minQueueBytes
	}
	return maxQueueBytes
}

// grow makes space for n more bytes in the queue, unless the connection has ended.
func (c *Conn) grow(n int) {
	need := len(c.queue) + n
	if need <= cap(c.queue) || need > largeBuffer || c.err != nil {
		return
	}
	class := slices.IndexFunc(bufferSizes[:], func(size int) bool { return size >= need })
	b, ok := buffers[class].Get().(*buffer)
	if !ok {
		b = &buffer{make([]byte, 0, bufferSizes[class]), &buffers[class]}
	}
	bufferedBytes.Add(int64(cap(b.data)))
	c.queue = append(b.data, c.queue...)
	c.buffer.release()
	c.buffer = b
}

// dropQueue drops the queue of a connection that has ended.
func (c *Conn) dropQueue() {
	c.buffer.release()
	c.queue, c.buffer = nil, nil
}

// release returns a buffer that no queue uses.
func (b *buffer) release() {
	if b != nil {
		bufferedBytes.Add(-int64(cap(b.data)))
		b.pool.Put(b)
	}
}
