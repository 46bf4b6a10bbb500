package rpc

import (
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that this one is but for lists
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// codec is gRPC's own for protobuf, and carries the bytes of the watch tier without copying them. A ListChunk's pieces
// are sent from where they are, as one piece, and received into a Chunk as they have come. A WatchFrame's events are
// sent from where they are too: messages that wait for slow receivers on many streams share them.
type codec struct{ encoding.CodecV2 }

var wireCodec = codec{encoding.GetCodecV2("proto")}

// smallPiece is the size below which a piece is copied beside others rather than sent by itself.
const smallPiece = 1 << 10

const (
	fieldData = 1
	fieldSize = 2
	fieldGzip = 3
	// maxChunkHead is how long a ListChunk of one piece is without it: three tags and three numbers.
	maxChunkHead = 3 * (1 + 10)
)

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	switch m := v.(type) {
	case *watchfanoutv1.ListChunk:
		if len(m.ProtoReflect().GetUnknown()) == 0 {
			return marshalChunk(m), nil
		}
	case *watchfanoutv1.WatchFrame:
		if len(m.Data) >= smallPiece || len(m.Initial) > 0 {
			return c.marshalFrame(m)
		}
	case *TrackedFrame:
		out, err := c.marshalFrame(m.WatchFrame)
		return append(out, m.endBuffer()), err
	case *Held:
		out, err := c.Marshal(m.Message)
		return append(out, m.end()), err
	}
	return c.CodecV2.Marshal(v)
}

// TrackedFrame is a WatchFrame whose sender learns when the transport is done with it. Send it with SendMsg.
type TrackedFrame struct {
	*watchfanoutv1.WatchFrame
	// Done is called when the frame's bytes are written or dropped; between services of one process, when the frame is
	// received. It is not called for a frame that no transport takes: the stream's context ends then.
	Done func()
}

// endBuffer returns the last buffer of an encoded frame. It is empty, and calls Done when it is freed.
func (m *TrackedFrame) endBuffer() mem.Buffer {
	data := counted[:0]
	return mem.NewBuffer(&data, doneFunc(m.Done))
}

// counted backs these buffers. gRPC counts the references of no buffer whose capacity is 1 KB or less.
var counted [1<<10 + 1]byte

// doneFunc is a mem.BufferPool that calls a function for what is put into it.
type doneFunc func()

// Get implements mem.BufferPool.
func (doneFunc) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put implements mem.BufferPool.
func (done doneFunc) Put(*[]byte) { done() }

const (
	frameData    = 1
	frameInitial = 7
	// maxPieceHead is the length of a piece's tag and length.
	maxPieceHead = 1 + 10
)

// marshalFrame encodes a WatchFrame with references to its data and to its initial events.
func (c codec) marshalFrame(m *watchfanoutv1.WatchFrame) (mem.BufferSlice, error) {
	out, err := c.CodecV2.Marshal(&watchfanoutv1.WatchFrame{
		Position:          m.Position,
		InitialEventsDone: m.InitialEventsDone,
		End:               m.End,
		Boundaries:        m.Boundaries,
		ColumnsSent:       m.ColumnsSent,
	})
	if err != nil {
		return nil, err
	}
	size := maxPieceHead
	for _, p := range m.Initial {
		if size += maxPieceHead; len(p) < smallPiece {
			size += len(p)
		}
	}
	if len(m.Data) < smallPiece {
		size += len(m.Data)
	}
	s := messageBuilder{out: out, copied: make([]byte, 0, size)}
	for _, p := range m.Initial {
		s.add(frameInitial, p)
	}
	if len(m.Data) > 0 {
		s.add(frameData, m.Data)
	}
	s.flush()
	return s.out, nil
}

// messageBuilder gathers an encoded message: small parts are copied, and large ones are where they were.
type messageBuilder struct {
	out mem.BufferSlice
	// copied has room for all that is copied: out refers to it. begun is the beginning of what out lacks.
	copied  []byte
	flushed int
}

// add appends a field of bytes.
func (s *messageBuilder) add(field protowire.Number, p []byte) {
	s.head(field, len(p))
	s.piece(p)
}

// head appends the tag and the length of a field of bytes.
func (s *messageBuilder) head(field protowire.Number, length int) {
	s.copied = protowire.AppendTag(s.copied, field, protowire.BytesType)
	s.copied = protowire.AppendVarint(s.copied, uint64(length))
}

// piece appends bytes of a field.
func (s *messageBuilder) piece(p []byte) {
	if len(p) < smallPiece {
		s.copied = append(s.copied, p...)
		return
	}
	s.flush()
	s.out = append(s.out, mem.SliceBuffer(p))
}

func (s *messageBuilder) flush() {
	if len(s.copied) > s.flushed {
		s.out = append(s.out, mem.SliceBuffer(s.copied[s.flushed:len(s.copied):len(s.copied)]))
		s.flushed = len(s.copied)
	}
}

func marshalChunk(m *watchfanoutv1.ListChunk) mem.BufferSlice {
	total, small := 0, 0
	for _, p := range m.Data {
		total += len(p)
		if len(p) < smallPiece {
			small += len(p)
		}
	}
	g := messageBuilder{copied: make([]byte, 0, maxChunkHead+small)}
	if m.Size != 0 {
		g.copied = protowire.AppendTag(g.copied, fieldSize, protowire.VarintType)
		g.copied = protowire.AppendVarint(g.copied, uint64(m.Size))
	}
	if m.Gzip {
		g.copied = protowire.AppendTag(g.copied, fieldGzip, protowire.VarintType)
		g.copied = protowire.AppendVarint(g.copied, 1)
	}
	if total > 0 {
		g.head(fieldData, total)
	}
	for _, p := range m.Data {
		g.piece(p)
	}
	g.flush()
	return g.out
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*Chunk); ok {
		return m.unmarshal(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// Chunk is a ListChunk as it is received: its bytes are where the transport has put them. Free it once they have been
// used.
type Chunk struct {
	// Data are the next bytes of the body, in pieces that follow each other.
	Data [][]byte
	// Size is the whole body's in bytes before it was compressed, in the first chunk.
	Size int64
	// Gzip says that the body is compressed, in the first chunk.
	Gzip bool

	buffers mem.BufferSlice
}

// ReceiveChunk receives a list's next chunk in place of stream.Recv.
func ReceiveChunk(stream grpc.ClientStream) (*Chunk, error) {
	c := &Chunk{}
	if err := stream.RecvMsg(c); err != nil {
		return nil, err
	}
	return c, nil
}

// Free gives the bytes back to the transport: they are another message's from here on.
func (c *Chunk) Free() {
	c.buffers.Free()
	c.Data, c.buffers = nil, nil
}

// setFrom makes the chunk a message that was not encoded.
func (c *Chunk) setFrom(m *watchfanoutv1.ListChunk) {
	c.Data, c.Size, c.Gzip = m.GetData(), m.GetSize(), m.GetGzip()
}

func (c *Chunk) unmarshal(data mem.BufferSlice) error {
	var prefix [maxChunkHead]byte
	reader := data.Reader()
	n, _ := reader.Read(prefix[:])
	_ = reader.Close()
	size, gzip, offset, ok := parseHead(prefix[:n], data.Len())
	if !ok { // in several pieces, as an older release sends them
		m := &watchfanoutv1.ListChunk{}
		if err := proto.Unmarshal(data.Materialize(), m); err != nil {
			return err
		}
		c.setFrom(m)
		return nil
	}
	c.Size, c.Gzip = size, gzip
	data.Ref()
	c.buffers = slices.Clone(data)
	for _, b := range data {
		p := b.ReadOnlyData()
		skipped := min(offset, len(p))
		if offset -= skipped; len(p) > skipped {
			c.Data = append(c.Data, p[skipped:])
		}
	}
	return nil
}

// parseHead reads what comes before the data of a message of some length: its size, whether it is compressed, and where
// the data begins. It is not ok where anything else is there than one piece, at the end.
func parseHead(prefix []byte, length int) (size int64, gzip bool, offset int, ok bool) {
	for {
		field, kind, n := protowire.ConsumeTag(prefix[offset:])
		if n < 0 {
			return 0, false, 0, false
		}
		value, m := protowire.ConsumeVarint(prefix[offset+n:])
		if m < 0 {
			return 0, false, 0, false
		}
		offset += n + m
		switch {
		case field == fieldSize && kind == protowire.VarintType:
			size = int64(value)
		case field == fieldGzip && kind == protowire.VarintType:
			gzip = value != 0
		case field == fieldData && kind == protowire.BytesType && value == uint64(length-offset):
			return size, gzip, offset, true
		default:
			return 0, false, 0, false
		}
	}
}
