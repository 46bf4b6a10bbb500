package h2writer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
)

// newReadConn returns a Conn whose client has sent data.
func newReadConn(data []byte) *Conn {
	c := &Conn{
		serverWindow:  defaultWindow,
		streamHeader:  "x-stream-token",
		in:            bufio.NewReaderSize(bytes.NewReader(data), 8<<10),
		streams:       map[uint32]*Stream{},
		initialWindow: defaultWindow,
		maxFrame:      16384,
		changed:       make(chan struct{}),
	}
	c.serverTurn.L = &c.mu
	return c
}

func frameOf(kind, flags byte, id uint32, body []byte) []byte {
	out := []byte{byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body)), kind, flags}
	out = binary.BigEndian.AppendUint32(out, id)
	return append(out, body...)
}

// FuzzConn sends arbitrary client frames. The server must receive whole frames, the number of tracked streams must stay
// bounded, and the windows must match the client's. Between them the server writes its own frames, in two pieces.
func FuzzConn(f *testing.F) {
	f.Add(frameOf(frameHeaders, flagEndHeaders, 1, []byte("block")), frameOf(frameData, 0, 1, []byte("x")))
	f.Add(frameOf(frameSettings, 0, 0, []byte{0, byte(settingInitialWindow), 0, 0, 0, 1, 0, byte(settingInitialWindow),
		0x7f, 0xff, 0xff, 0xff}), frameOf(frameGoAway, 0, 0, make([]byte, 8)))
	f.Add(append(frameOf(frameHeaders, flagEndHeaders|flagPadded, 3, []byte{1, 'a', 0}),
		frameOf(frameWindowUpdate, 0, 3, []byte{0, 0, 1, 0})...), frameOf(frameReset, 0, 3, make([]byte, 4)))
	f.Add(frameOf(frameWindowUpdate, 0, 0, []byte{0x7f, 0xff, 0xff, 0xff}),
		frameOf(frameContinuation, flagEndHeaders, 1, nil))
	f.Fuzz(func(t *testing.T, fromClient, fromServer []byte) {
		c := newReadConn(fromClient)
		half := len(fromServer) / 2
		c.mu.Lock()
		c.observe(fromServer[:half])
		c.mu.Unlock()
		var got []byte
		buf := make([]byte, 100)
		for {
			n, err := c.Read(buf)
			got = append(got, buf[:n]...)
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatal(err)
				}
				break
			}
			if len(got) > 4*len(fromClient)+1000*len(fromClient)/frameHeaderBytes {
				t.Fatal("Read returns more than the client sent")
			}
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.observe(fromServer[half:])
		if len(c.streams) > maxStreams {
			t.Errorf("%d streams", len(c.streams))
		}
		for id, s := range c.streams {
			if s.id != id || s.closed {
				t.Errorf("stream %d is %d, closed: %v", id, s.id, s.closed)
			}
		}
		for len(got) >= frameHeaderBytes { // whole frames, except the last
			n := int(got[0])<<16 | int(got[1])<<8 | int(got[2])
			got = got[min(len(got), frameHeaderBytes+n):]
		}
	})
}

// Streams after the server's GOAWAY are not tracked (S17).
func TestIgnoredStreamsAreNotTracked(t *testing.T) {
	var sent []byte
	for id := uint32(1); id < 2*20_000; id += 2 {
		sent = append(sent, frameOf(frameHeaders, flagEndHeaders, id, []byte("block"))...)
	}
	for _, goAway := range []bool{false, true} {
		c := newReadConn(sent)
		if goAway {
			c.observe(frameOf(frameGoAway, 0, 0, make([]byte, 8)))
		}
		_, _ = io.Copy(io.Discard, struct{ io.Reader }{connReader(c)})
		if n := len(c.streams); n > maxStreams || goAway && n > 0 {
			t.Errorf("after GOAWAY %v: %d streams are tracked", goAway, n)
		}
	}
}

func connReader(c *Conn) io.Reader { return readFunc(c.Read) }

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }
