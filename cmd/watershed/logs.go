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

// logFiles bounds the log files of a data directory, which lie on the disk of etcd and NATS.
type logFiles struct{ maxSize int }

// oldLogFiles is how many older files remain beside each log file.
const oldLogFiles = 3

// unlimited is a maximum size in megabytes that no file reaches.
const unlimited = 1 << 30

func (f *logFiles) addFlags(fs *pflag.FlagSet) {
	fs.IntVar(&f.maxSize, "log-file-max-size", 32, fmt.Sprintf(
		"The maximum size a log file can grow to, in megabytes, before it is renamed. %d older files of each process are kept. "+
			"If the value is 0, the maximum file size is unlimited.", oldLogFiles))
}

func (f *logFiles) validate() error {
	if f.maxSize < 0 || f.maxSize > unlimited {
		return fmt.Errorf("--log-file-max-size %d: want 0 to %d megabytes", f.maxSize, unlimited)
	}
	return nil
}

// open returns the log file at path. It is made with the first write, and appended to if it exists. A file that is
// larger than the maximum is removed: it would remain as one of the older files.
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

// logFile is a log file of a bounded size. Its Logger keeps a goroutine for as long as the process lasts.
type logFile struct {
	*lumberjack.Logger
	// faults is where the first error is printed.
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
	f.once.Do(func() { fmt.Fprintf(f.faults, "The log file %s has failed, and may lack lines: %v\n", f.Filename, err) })
}

// output is what a child process writes: into its log file, with the end of it in memory.
type output struct {
	file io.Writer
	end  []byte
}

// endBytes is how much of a process's output is in memory when the process ends.
const endBytes = 16 << 10

// Write implements io.Writer. It takes everything, also when the disk is full: a process must not end because its log
// cannot be written.
func (o *output) Write(p []byte) (int, error) {
	_, _ = o.file.Write(p)
	o.end = append(o.end, p[max(0, len(p)-endBytes):]...)
	o.end = append(o.end[:0], o.end[max(0, len(o.end)-endBytes):]...)
	return len(p), nil
}

// lastError returns the text after the last line that begins with prefix, without the prefix and to the end of the
// output: joined errors have several lines. It is empty if no line begins so.
func (o *output) lastError(prefix string) string {
	text := "\n" + string(o.end)
	index := strings.LastIndex(text, "\n"+prefix)
	if index < 0 {
		return ""
	}
	return strings.TrimSpace(text[index+1+len(prefix):])
}
