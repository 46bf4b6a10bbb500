package rpc

import (
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that this package wraps
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// codec is gRPC's codec for protobuf, without copies of the watch tier's bytes. It sends the pieces of a ListChunk by
// reference, as one piece, and receives them into a Chunk. It also sends a WatchFrame's events by reference, and
// receives them with a single copy. Messages that wait for slow receivers on many streams therefore share them.
type codec struct{ encoding.CodecV2 }

var wireCodec = codec{encoding.GetCodecV2("proto")}

// smallPiece is the size in bytes below which a piece is copied. Larger pieces are sent by reference.
const smallPiece = 1 << 10

const (
	fieldData = 1
	fieldSize = 2
	fieldGzip = 3
	// maxChunkHead bounds the bytes before the data of a ListChunk with one piece: three tags and three numbers.
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

// TrackedFrame is a WatchFrame that notifies its sender when the transport no longer needs it. Send it with SendMsg.
type TrackedFrame struct {
	*watchfanoutv1.WatchFrame
	// Done is called when gRPC has written or dropped the frame's bytes, or when a service in the same process has
	// received the frame. It is not called for a frame that no transport accepts: the stream's context then ends.
	Done func()
}

// endBuffer returns the last buffer of an encoded frame. It is empty, and calls Done when it is freed.
func (m *TrackedFrame) endBuffer() mem.Buffer {
	data := counted[:0]
	return mem.NewBuffer(&data, doneFunc(m.Done))
}

// counted backs the empty last buffers of messages. gRPC counts references only to buffers with a capacity above 1 KB.
var counted [1<<10 + 1]byte

// doneFunc is a mem.BufferPool that calls a function when a buffer is freed.
type doneFunc func()

// Get implements mem.BufferPool.
func (doneFunc) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put implements mem.BufferPool.
func (done doneFunc) Put(*[]byte) { done() }

const (
	frameData    = 1
	frameInitial = 7
	// maxPieceHead bounds the bytes of a piece's tag and length.
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
		WatchId:           m.WatchId,
		Status:            m.Status,
		CrdChangedAt:      m.CrdChangedAt,
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

// messageBuilder builds an encoded message. It copies small parts and refers to large parts.
type messageBuilder struct {
	out mem.BufferSlice
	// copied has capacity for all copied bytes, because out refers to it. The bytes before flushed are already in out.
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
	switch m := v.(type) {
	case *Chunk:
		return m.unmarshal(data)
	case *watchfanoutv1.WatchFrame:
		if len(data) > 1 {
			return unmarshalFrame(data.Materialize(), m)
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// unmarshalFrame decodes a WatchFrame whose events refer to data. gRPC's codec copies a message of several buffers into
// a pooled buffer, which it clears before and which may be 32 times as large. It then copies each event.
func unmarshalFrame(data []byte, m *watchfanoutv1.WatchFrame) error {
	var rest, events []byte
	var initial [][]byte
	for len(data) > 0 {
		field, kind, tag := protowire.ConsumeTag(data)
		if tag < 0 {
			return protowire.ParseError(tag)
		}
		value := protowire.ConsumeFieldValue(field, kind, data[tag:])
		if value < 0 {
			return protowire.ParseError(value)
		}
		p, _ := protowire.ConsumeBytes(data[tag:])
		switch {
		case field == frameData && kind == protowire.BytesType:
			events = p[:len(p):len(p)]
		case field == frameInitial && kind == protowire.BytesType:
			initial = append(initial, p[:len(p):len(p)])
		default:
			rest = append(rest, data[:tag+value]...)
		}
		data = data[tag+value:]
	}
	if err := proto.Unmarshal(rest, m); err != nil {
		return err
	}
	m.Data, m.Initial = events, initial
	return nil
}

// Chunk is a received ListChunk. Its bytes stay in the buffers of the transport. Free it after use.
type Chunk struct {
	// Data are the next bytes of the body, in consecutive pieces.
	Data [][]byte
	// Size is the size in bytes of the whole uncompressed body. Only the first chunk has it.
	Size int64
	// Gzip is set in the first chunk if the body is compressed.
	Gzip bool

	buffers mem.BufferSlice
}

// ReceiveChunk receives a list's next chunk. Use it instead of stream.Recv.
func ReceiveChunk(stream grpc.ClientStream) (*Chunk, error) {
	c := &Chunk{}
	if err := stream.RecvMsg(c); err != nil {
		return nil, err
	}
	return c, nil
}

// Free returns the buffers to the transport, which reuses them for other messages.
func (c *Chunk) Free() {
	c.buffers.Free()
	c.Data, c.buffers = nil, nil
}

// setFrom sets the chunk from a message that was not encoded, or that protobuf has decoded.
func (c *Chunk) setFrom(m *watchfanoutv1.ListChunk) {
	c.Data, c.Size, c.Gzip = m.GetData(), m.GetSize(), m.GetGzip()
}

func (c *Chunk) unmarshal(data mem.BufferSlice) error {
	var prefix [maxChunkHead]byte
	reader := data.Reader()
	n, _ := reader.Read(prefix[:])
	_ = reader.Close()
	size, gzip, offset, ok := parseHead(prefix[:n], data.Len())
	if !ok { // a message without data, or with fields of another release
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

// parseHead parses the fields before the data of a message of length bytes. It returns the body's size and
// compression, and the offset of the data. ok is false unless the message ends with exactly one piece.
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
