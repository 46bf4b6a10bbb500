package eventlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// endFile holds an observed end in a mapped file. A write needs no system call, and the file survives the process. It
// does not survive a crash of the machine with its latest end.
//
// The file has a checksum of the rest (4 bytes), the length of the end (4), the time of the write in nanoseconds (8),
// and the end, a logv1.ObservedEnd. A process that is killed during a write leaves a wrong checksum, and so no end.
type endFile struct {
	page []byte
	// message and encoded are buffers of write.
	message logv1.ObservedEnd
	encoded []byte
}

const (
	// endFileSize is the size of the file in bytes. The longest etcd keys have some 700.
	endFileSize = 4096
	// endHeader is the size of the checksum, the length and the time, in bytes.
	endHeader = 16
	// maxEndAge bounds the age of an end that a process continues from. etcd may have been restored since an old end.
	maxEndAge = 10 * time.Minute
)

var endChecksum = crc32.MakeTable(crc32.Castagnoli)

// openEndFile opens the file at path, and creates it if necessary. It returns the end that the file holds, which is
// empty if the file has none, or an end that is older than maxEndAge.
func openEndFile(path string) (*endFile, core.LogEnd, error) {
	none := core.LogEnd{Empty: true}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, none, err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, none, err
	}
	defer file.Close()
	content := make([]byte, endFileSize)
	if _, err := io.ReadFull(file, content); err != nil && !errors.Is(err, io.EOF) &&
		!errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, none, err
	}
	// A full disk would otherwise end the process when it writes to the mapped file.
	if _, err := file.WriteAt(content, 0); err != nil {
		return nil, none, err
	}
	page, err := unix.Mmap(int(file.Fd()), 0, endFileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, none, fmt.Errorf("map %s: %w", path, err)
	}
	return &endFile{page: page}, endOf(content, time.Now()), nil
}

// endOf returns the end that a file holds.
func endOf(content []byte, now time.Time) core.LogEnd {
	none := core.LogEnd{Empty: true}
	length := binary.LittleEndian.Uint32(content[4:])
	if length == 0 || length > endFileSize-endHeader {
		return none
	}
	content = content[:endHeader+length]
	if binary.LittleEndian.Uint32(content) != crc32.Checksum(content[4:], endChecksum) {
		return none
	}
	age := now.UnixNano() - int64(binary.LittleEndian.Uint64(content[8:]))
	if age < 0 || age > int64(maxEndAge) {
		return none
	}
	e := &logv1.ObservedEnd{}
	if proto.Unmarshal(content[endHeader:], e) != nil {
		return none
	}
	return decodeEnd(e)
}

// write replaces the end that the file holds. The file holds no end if it is too small.
func (f *endFile) write(end core.LogEnd) {
	binary.LittleEndian.PutUint32(f.page[4:], 0)
	if end.Empty {
		return
	}
	var err error
	f.encoded, err = proto.MarshalOptions{}.MarshalAppend(f.encoded[:0], encodeEnd(&f.message, end))
	if err != nil || len(f.encoded) > endFileSize-endHeader {
		return
	}
	content := f.page[:endHeader+len(f.encoded)]
	copy(content[endHeader:], f.encoded)
	binary.LittleEndian.PutUint64(content[8:], uint64(time.Now().UnixNano()))
	binary.LittleEndian.PutUint32(content[4:], uint32(len(f.encoded)))
	binary.LittleEndian.PutUint32(content, crc32.Checksum(content[4:], endChecksum))
}
