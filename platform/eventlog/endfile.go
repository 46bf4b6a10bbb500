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

// endFile holds an observed end in a mapped file. A write needs no system call, and the file survives the process. A
// crash of the machine may lose the latest writes. The file stays mapped until the process exits.
//
// All integers are little-endian. A CRC-32C (4 bytes) covers the rest: the length of the end (4), the time of the write
// (8, nanoseconds since 1970), and the end, a logv1.ObservedEnd. A process that is killed during a write leaves the
// length 0 or a wrong checksum, so the file has no end.
type endFile struct {
	// page is the mapped file. The mapping also holds the file's lock.
	page []byte
	// message and encoded are buffers of write.
	message logv1.ObservedEnd
	encoded []byte
}

const (
	// endFileSize is the size of the file in bytes. An etcd key has about 700 bytes at most.
	endFileSize = 4096
	// endHeader is the size of the checksum, the length and the time, in bytes.
	endHeader = 16
	// maxEndAge bounds the time since the last write, because etcd may have been restored since an earlier write. A
	// process writes every 30 s at least, with the publisher's progress.
	maxEndAge = time.Minute
)

var endChecksum = crc32.MakeTable(crc32.Castagnoli)

// openEndFile opens and locks the file at path. It creates the file and its directory if necessary.
func openEndFile(path string) (*endFile, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s, which another process may use: %w", path, err)
	}
	content := make([]byte, endFileSize)
	if _, err := io.ReadFull(file, content); err != nil && !errors.Is(err, io.EOF) &&
		!errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	// The file gets its blocks now. On a full disk, a later write to the mapped file would end the process.
	if _, err := file.WriteAt(content, 0); err != nil {
		return nil, err
	}
	page, err := unix.Mmap(int(file.Fd()), 0, endFileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return &endFile{page: page}, nil
}

// end returns the end that the file holds. It is empty if the file has no valid end, or was not written within
// maxEndAge before now.
func (f *endFile) end(now time.Time) core.LogEnd {
	none := core.LogEnd{Empty: true}
	length := binary.LittleEndian.Uint32(f.page[4:])
	if length == 0 || length > endFileSize-endHeader {
		return none
	}
	content := f.page[:endHeader+length]
	if binary.LittleEndian.Uint32(content) != crc32.Checksum(content[4:], endChecksum) {
		return none
	}
	age := now.UnixNano() - int64(binary.LittleEndian.Uint64(content[8:]))
	e := &logv1.ObservedEnd{}
	if age < 0 || age > int64(maxEndAge) || proto.Unmarshal(content[endHeader:], e) != nil {
		return none
	}
	return endIn(e)
}

// write replaces the end that the file holds. If the end does not fit, the file then holds none.
func (f *endFile) write(end core.LogEnd) {
	binary.LittleEndian.PutUint32(f.page[4:], 0)
	if end.Empty {
		return
	}
	var err error
	f.encoded, err = proto.MarshalOptions{}.MarshalAppend(f.encoded[:0], setEnd(&f.message, end))
	if err != nil || len(f.encoded) > endFileSize-endHeader {
		return
	}
	content := f.page[:endHeader+len(f.encoded)]
	copy(content[endHeader:], f.encoded)
	binary.LittleEndian.PutUint64(content[8:], uint64(time.Now().UnixNano()))
	binary.LittleEndian.PutUint32(content[4:], uint32(len(f.encoded)))
	binary.LittleEndian.PutUint32(content, crc32.Checksum(content[4:], endChecksum))
}
