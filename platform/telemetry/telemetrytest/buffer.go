package telemetrytest

import (
	"bytes"
	"sync"
)

// Buffer is a log that several goroutines write. The zero value is empty.
type Buffer struct {
	mu  sync.Mutex
	out bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.Write(p)
}

// String returns the text that was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.String()
}
