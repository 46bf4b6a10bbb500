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

// codec is gRPC's own for protobuf, and carries lists without copying them: a ListChunk's pieces are sent from where
// they are, as one piece, and received into a Chunk as they have come.
type codec struct{ encoding.CodecV2 }

var lists = codec{encoding.GetCodecV2("proto")}

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
	if m, ok := v.(*watchfanoutv1.ListChunk); ok && len(m.ProtoReflect().GetUnknown()) == 0 {
		return marshalChunk(m), nil
	}
	return c.CodecV2.Marshal(v)
}

func marshalChunk(m *watchfanoutv1.ListChunk) (out mem.BufferSlice) {
	total, small := 0, 0
	for _, p := range m.Data {
		total += len(p)
		if len(p) < smallPiece {
			small += len(p)
		}
	}
	// what is copied, in one allocation that does not grow: out refers to it
	copied := make([]byte, 0, maxChunkHead+small)
	if m.Size != 0 {
		copied = protowire.AppendTag(copied, fieldSize, protowire.VarintType)
		copied = protowire.AppendVarint(copied, uint64(m.Size))
	}
	if m.Gzip {
		copied = protowire.AppendTag(copied, fieldGzip, protowire.VarintType)
		copied = protowire.AppendVarint(copied, 1)
	}
	if total > 0 {
		copied = protowire.AppendTag(copied, fieldData, protowire.BytesType)
		copied = protowire.AppendVarint(copied, uint64(total))
	}
	begun := 0
	flush := func() {
		if len(copied) > begun {
			out = append(out, mem.SliceBuffer(copied[begun:len(copied):len(copied)]))
			begun = len(copied)
		}
	}
	for _, p := range m.Data {
		if len(p) < smallPiece {
			copied = append(copied, p...)
			continue
		}
		flush()
		out = append(out, mem.SliceBuffer(p))
	}
	flush()
	return out
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(*Chunk); ok {
		return m.read(data)
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

	held mem.BufferSlice
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
	c.held.Free()
	c.Data, c.held = nil, nil
}

// of makes the chunk a message that was not encoded.
func (c *Chunk) of(m *watchfanoutv1.ListChunk) {
	c.Data, c.Size, c.Gzip = m.GetData(), m.GetSize(), m.GetGzip()
}

func (c *Chunk) read(data mem.BufferSlice) error {
	var begins [maxChunkHead]byte
	reader := data.Reader()
	n, _ := reader.Read(begins[:])
	_ = reader.Close()
	size, gzip, at, ok := headOf(begins[:n], data.Len())
	if !ok { // in several pieces, as an older release sends them
		m := &watchfanoutv1.ListChunk{}
		if err := proto.Unmarshal(data.Materialize(), m); err != nil {
			return err
		}
		c.of(m)
		return nil
	}
	c.Size, c.Gzip = size, gzip
	data.Ref()
	c.held = slices.Clone(data)
	for _, b := range data {
		p := b.ReadOnlyData()
		skipped := min(at, len(p))
		if at -= skipped; len(p) > skipped {
			c.Data = append(c.Data, p[skipped:])
		}
	}
	return nil
}

// headOf reads what comes before the data of a message of some length: its size, whether it is compressed, and where
// the data begins. It is not ok where anything else is there than one piece, at the end.
func headOf(begins []byte, length int) (size int64, gzip bool, at int, ok bool) {
	for {
		field, kind, n := protowire.ConsumeTag(begins[at:])
		if n < 0 {
			return 0, false, 0, false
		}
		value, m := protowire.ConsumeVarint(begins[at+n:])
		if m < 0 {
			return 0, false, 0, false
		}
		at += n + m
		switch {
		case field == fieldSize && kind == protowire.VarintType:
			size = int64(value)
		case field == fieldGzip && kind == protowire.VarintType:
			gzip = value != 0
		case field == fieldData && kind == protowire.BytesType && value == uint64(length-at):
			return size, gzip, at, true
		default:
			return 0, false, 0, false
		}
	}
}
