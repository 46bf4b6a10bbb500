package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/spf13/pflag"
	"gopkg.in/natefinch/lumberjack.v2"
)

// logFiles bounds the log files of a data directory, which share a disk with etcd and NATS.
type logFiles struct{ maxSize int }

// oldLogFiles is the number of rotated files of each log file.
const oldLogFiles = 3

// unlimited is a maximal size in megabytes that no file reaches.
const unlimited = 1 << 30

func (f *logFiles) addFlags(fs *pflag.FlagSet) {
	fs.IntVar(&f.maxSize, "log-file-max-size", 32, fmt.Sprintf(
		"The maximum size a log file can grow to, in megabytes, before it is renamed. %d older files of each process "+
			"are kept. If the value is 0, the maximum file size is unlimited.", oldLogFiles))
}

func (f *logFiles) validate() error {
	if f.maxSize < 0 || f.maxSize > unlimited {
		return fmt.Errorf("--log-file-max-size %d: want 0 to %d megabytes", f.maxSize, unlimited)
	}
	return nil
}

// open returns the log file at path. The first write creates the file, or appends to an existing file. open removes a
// file that is larger than the maximum, because it would remain as a rotated file.
func (f *logFiles) open(path string) *logFile {
	size := f.maxSize
	if size == 0 {
		size = unlimited
	}
	log := &logFile{
		Logger: &lumberjack.Logger{Filename: path, MaxSize: size, MaxBackups: oldLogFiles},
		faults: os.Stderr,
	}
	if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Size() > int64(size)<<20 {
		if err := os.Remove(path); err != nil {
			log.fault(err)
		}
	}
	return log
}

// logFile is a log file with a bounded size. Its Logger has a goroutine that ends with the process.
type logFile struct {
	*lumberjack.Logger
	// faults receives the first error.
	faults io.Writer
	once   sync.Once
}

// Write implements io.Writer.
func (f *logFile) Write(p []byte) (int, error) {
	n, err := f.Logger.Write(p)
	if err != nil {
		f.fault(err)
	}
	return n, err
}

func (f *logFile) fault(err error) {
	f.once.Do(func() { fmt.Fprintf(f.faults, "The log file %s is incomplete: %v\n", f.Filename, err) })
}

// output receives the output of a child process. It writes a log file and buffers the end of the output.
type output struct {
	file io.Writer
	end  []byte
}

// endBytes is the number of bytes of output in the buffer.
const endBytes = 16 << 10

// Write implements io.Writer. It never fails, even on a full disk, because a process must not end if its log cannot be
// written.
func (o *output) Write(p []byte) (int, error) {
	_, _ = o.file.Write(p)
	o.end = append(o.end, p[max(0, len(p)-endBytes):]...)
	o.end = append(o.end[:0], o.end[max(0, len(o.end)-endBytes):]...)
	return len(p), nil
}

// lastError returns the text after prefix in the last line that begins with prefix, to the end of the output. Joined
// errors have several lines. It returns nothing if no line begins with prefix.
func (o *output) lastError(prefix string) string {
	text := "\n" + string(o.end)
	index := strings.LastIndex(text, "\n"+prefix)
	if index < 0 {
		return ""
	}
	return strings.TrimSpace(text[index+1+len(prefix):])
}
