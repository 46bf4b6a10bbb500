package eventlog

import (
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// encodingHeader names the encodings of a message's data (StoredMessage.encoding). Without it, data is an Event.
	encodingHeader  = "Content-Encoding"
	s2Encoding      = "s2"
	batchEncoding   = "batch"
	batchS2Encoding = "batch, s2"
	// compressThreshold is the size in bytes above which a message is compressed. Below it, the compression costs more
	// than NATS saves. An object's JSON may be six times the size of the client's request, and all resources share the
	// size limit of the log.
	compressThreshold = 4 << 10
	// maxEventBytes bounds the decompressed size of a message. It fits an object of 3 MB twice, each as protobuf and as
	// JSON that escapes every byte, with a reserve.
	maxEventBytes = 64 << 20
	// maxBatchBytes bounds the decompressed size of a batch. A writer of a later release may send larger batches.
	maxBatchBytes = 1 << 20
)

// Message returns the NATS message of e. An error means that e cannot be a message; nothing was sent.
func Message(e *logv1.Event) (*nats.Msg, error) {
	data, err := proto.MarshalOptions{}.MarshalAppend(payloads.get(), e)
	if err != nil {
		return nil, err
	}
	if len(data) > maxEventBytes {
		return nil, fmt.Errorf("the event has %d bytes, the limit of a message is %d", len(data), maxEventBytes)
	}
	subject := progressSubject
	if e.StorageResource != "" {
		subject = Subject(e.StorageResource)
	}
	m := &nats.Msg{Subject: subject, Data: data, Header: nats.Header{}}
	if len(data) > batchBytes { // it joins no batch
		compressMessage(m, s2Encoding, nil)
	}
	return m, nil
}

// payloads are buffers of encoded events, which a Writer has sent.
var payloads bufferPool

// bufferPool holds buffers of at most batchBytes.
type bufferPool struct{ sync.Pool }

func (p *bufferPool) get() []byte {
	if b, ok := p.Get().(*[]byte); ok {
		return (*b)[:0]
	}
	return nil
}

func (p *bufferPool) put(b []byte) {
	if cap(b) <= batchBytes {
		p.Put(&b)
	}
}

// isCompressed returns true if Message has compressed a large event.
func isCompressed(m *nats.Msg) bool { return m.Header.Get(encodingHeader) != "" }

// compressMessage compresses the data of a message above the threshold, into buffer if it has the space. encoding then
// names its encodings. It returns the buffer for the next message.
func compressMessage(m *nats.Msg, encoding string, buffer []byte) []byte {
	if len(m.Data) <= compressThreshold {
		return buffer
	}
	data, ok := compress(buffer, m.Data)
	if ok {
		m.Data = data
		m.Header.Set(encodingHeader, encoding)
	}
	return data
}

// compress compresses data, into buffer if it has the space. ok is false if data did not get smaller.
func compress(buffer, data []byte) (_ []byte, ok bool) {
	compressed := s2.Encode(buffer[:cap(buffer)], data)
	return compressed, len(compressed) < len(data)
}

// decompress returns data before its compression. It rejects data that exceeds a limit.
func decompress(data []byte, limit int) ([]byte, error) {
	n, err := s2.DecodedLen(data)
	if err != nil {
		return nil, err
	}
	if n > limit {
		return nil, fmt.Errorf("the message decompresses to %d bytes, the limit is %d", n, limit)
	}
	return s2.Decode(nil, data)
}

// Events returns the events of a message with the header, for tests: at least one, unless it returns an error. Readers
// use LogID.events, which counts corrupt messages.
func Events(header nats.Header, data []byte) ([]*logv1.Event, error) {
	return eventsOf(storedMessage(header, 0, data))
}

func decode(encoding string, data []byte) (_ []*logv1.Event, err error) {
	switch encoding {
	case "", batchEncoding:
	case s2Encoding:
		data, err = decompress(data, maxEventBytes)
	case batchS2Encoding:
		data, err = decompress(data, maxBatchBytes)
	default:
		err = fmt.Errorf("unknown %s %q", encodingHeader, encoding)
	}
	if err != nil {
		return nil, err
	}
	b := &logv1.Batch{}
	if encoding == batchEncoding || encoding == batchS2Encoding {
		err = proto.Unmarshal(data, b)
	} else {
		b.Events = []*logv1.Event{{}}
		err = proto.Unmarshal(data, b.Events[0])
	}
	switch {
	case err != nil:
		return nil, err
	case len(b.Events) == 0:
		return nil, errors.New("the batch has no events")
	}
	return b.Events, nil
}
