package h2writer

import (
	"net/http"
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

// bufferOwner is a user with open connections. owners has each.
type bufferOwner struct {
	name          string
	connections   int
	bufferedBytes atomic.Int64
}

var owners = struct {
	sync.Mutex
	byName map[string]*bufferOwner
}{byName: map[string]*bufferOwner{}}

// SetOwner makes the buffers of req's connection count for an owner. The first owner stays, and the empty owner sets
// none.
func SetOwner(req *http.Request, owner string) {
	c, ok := req.Context().Value(connKey{}).(*Conn)
	if !ok || owner == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.owner != nil || c.err != nil {
		return
	}
	owners.Lock()
	defer owners.Unlock()
	o := owners.byName[owner]
	if o == nil {
		o = &bufferOwner{name: owner}
		owners.byName[owner] = o
	}
	o.connections++
	o.bufferedBytes.Add(c.bufferedBytes)
	c.owner = o
}

// leave removes a connection of an owner.
func (o *bufferOwner) leave() {
	if o == nil {
		return
	}
	owners.Lock()
	defer owners.Unlock()
	if o.connections--; o.connections == 0 {
		delete(owners.byName, o.name)
	}
}

// queueLimit returns the present limit on the bytes that wait for the connection's socket.
func (c *Conn) queueLimit() int {
	if bufferedBytes.Load() > maxBufferedBytes && c.owner != nil && c.owner.bufferedBytes.Load() > maxOwnBufferedBytes {
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
	c.account(b, 1)
	c.queue = append(b.data, c.queue...)
	c.release(c.buffer)
	c.buffer = b
}

// account adds the size of a buffer to the bytes that count, or removes it if sign is -1.
func (c *Conn) account(b *buffer, sign int64) {
	n := sign * int64(cap(b.data))
	bufferedBytes.Add(n)
	c.bufferedBytes += n
	if c.owner != nil {
		c.owner.bufferedBytes.Add(n)
	}
}

// dropQueue drops the queue of a connection that has ended.
func (c *Conn) dropQueue() {
	c.release(c.buffer)
	c.queue, c.buffer = nil, nil
}

// release returns a buffer that the queue does not use.
func (c *Conn) release(b *buffer) {
	if b != nil {
		c.account(b, -1)
		b.pool.Put(b)
	}
}
