package eventlog

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// keptEnd returns the content of a file with the end of a log, and the end.
func keptEnd(t testing.TB) (content []byte, end core.LogEnd) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "new", "log-end")
	o := processWith(t, path)
	o.Observe(&logv1.Event{Epoch: "e", Revision: 6, FencingToken: "one", NextFencingToken: "two"}, "")
	o.Observe(&logv1.Event{Type: logv1.Type_TYPE_DELETED, Epoch: "e", Revision: 7, StorageResource: "pods"}, "/pods/a")
	o.Replace()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content, o.End()
}

// processWith returns the observed end of a process with a file.
func processWith(t testing.TB, path string) *ObservedEnd {
	t.Helper()
	o := &ObservedEnd{}
	if err := o.Keep(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.exit)
	return o
}

// exit releases the file, as the end of the process does.
func (o *ObservedEnd) exit() {
	if o.file.page != nil {
		_ = unix.Munmap(o.file.page)
	}
	o.file.page = nil
}

// fileWith returns the path of a file with the content.
func fileWith(t testing.TB, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log-end")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A process has the end that an earlier process has kept, beside its own, until it has read the log to its end. It then
// keeps its own end, with each later event.
func TestAnEndOutlivesItsProcess(t *testing.T) {
	content, end := keptEnd(t)
	path := fileWith(t, content)
	revisions := func(o *ObservedEnd) (all []int64) {
		for _, e := range o.Ends() {
			all = append(all, e.Last.Revision)
		}
		return all
	}
	change := func(revision int64) *logv1.Event {
		return &logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: revision, StorageResource: "pods"}
	}
	o := processWith(t, path)
	kept := o.Ends()
	if len(kept) != 1 || kept[0].Last.Revision != 7 || kept[0].Event != end.Event || kept[0].Progress.Epoch != "e" ||
		!kept[0].HasToken("one") || !kept[0].HasToken("two") {
		t.Fatalf("kept %+v, of %+v", kept, end)
	}
	if own := o.End(); !own.Empty {
		t.Errorf("it has read %+v", own)
	}
	// A log may begin with older tokens, and with another epoch.
	o.Observe(&logv1.Event{Epoch: "before", Revision: 2, FencingToken: "zero"}, "")
	o.Observe(&logv1.Event{Epoch: "e", Revision: 3, FencingToken: "none"}, "")
	if got := revisions(o); !slices.Equal(got, []int64{3, 7}) || !o.Ends()[1].HasToken("one") {
		t.Errorf("while it reads the log, its ends are %v", got)
	}
	o.exit()
	o = processWith(t, path)
	if got := revisions(o); !slices.Equal(got, []int64{7}) {
		t.Errorf("after another restart, its ends are %v", got)
	}
	o.Observe(&logv1.Event{Epoch: "e", Revision: 8, FencingToken: "two"}, "")
	o.Replace()
	o.Observe(change(9), "/pods/b")
	if got := revisions(o); !slices.Equal(got, []int64{9}) {
		t.Errorf("after it has read the log, its ends are %v", got)
	}
	o.exit()
	o = processWith(t, path)
	if got := revisions(o); !slices.Equal(got, []int64{9}) || o.Ends()[0].Event.Key != "/pods/b" {
		t.Errorf("after the last restart, its ends are %v", got)
	}
}

// A single process uses the file.
func TestAFileIsOfOneProcess(t *testing.T) {
	content, _ := keptEnd(t)
	path := fileWith(t, content)
	o := processWith(t, path)
	var second ObservedEnd
	if err := second.Keep(path); err == nil {
		t.Error("two processes use the file")
	}
	o.exit()
	processWith(t, path)
}

// A file with a changed or missing byte, and a file of another time, have no end.
func TestADamagedEndIsNone(t *testing.T) {
	content, _ := keptEnd(t)
	now := time.Now()
	endAt := func(content []byte, now time.Time) core.LogEnd { return (&endFile{page: content}).end(now) }
	if endAt(content, now).Empty {
		t.Fatal("the file has no end")
	}
	for when, later := range map[string]time.Duration{"an old": maxEndAge + time.Second, "a future": -time.Hour} {
		if end := endAt(content, now.Add(later)); !end.Empty {
			t.Errorf("%s file has the end %+v", when, end)
		}
	}
	size := endHeader + int(binary.LittleEndian.Uint32(content[4:]))
	for i := range size {
		damaged := bytes.Clone(content)
		damaged[i]++
		if end := endAt(damaged, now); !end.Empty {
			t.Fatalf("with byte %d changed, the file has the end %+v", i, end)
		}
		if ends := processWith(t, fileWith(t, content[:i])).Ends(); len(ends) > 0 {
			t.Fatalf("with %d bytes, the file has the end %+v", i, ends)
		}
	}
}

// A key that does not fit leaves no end: without its last event, the end would prove less. The same holds for an epoch
// whose tokens are not read yet.
func TestAnIncompleteEndIsNotKept(t *testing.T) {
	content, _ := keptEnd(t)
	change := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: 8, StorageResource: "pods"}
	for key, epoch := range map[string]string{strings.Repeat("x", endFileSize): "e", "/pods/a": "another"} {
		path := fileWith(t, content)
		o := processWith(t, path)
		o.Observe(&logv1.Event{Epoch: "e", Revision: 7, FencingToken: "one"}, "")
		o.Replace()
		change.Epoch = epoch
		o.Observe(change, key)
		o.exit()
		if ends := processWith(t, path).Ends(); len(ends) > 0 {
			t.Errorf("the file has %+v", ends)
		}
	}
}

// A path that cannot be a file is an error, so that registry does not start.
func TestAnEndNeedsAFile(t *testing.T) {
	content, _ := keptEnd(t)
	path := fileWith(t, content)
	for _, p := range []string{filepath.Dir(path), filepath.Join(path, "below a file")} {
		var o ObservedEnd
		if err := o.Keep(p); err == nil {
			t.Errorf("%s keeps an end", p)
		}
	}
}

// The content of a file is an end or none.
func FuzzEndFile(f *testing.F) {
	content, _ := keptEnd(f)
	f.Add(content[endHeader:endHeader+binary.LittleEndian.Uint32(content[4:])], true)
	f.Add([]byte{8, 1}, false)
	f.Fuzz(func(t *testing.T, end []byte, sound bool) {
		if len(end) > endFileSize-endHeader {
			return
		}
		content := make([]byte, endFileSize)
		now := time.Now()
		binary.LittleEndian.PutUint32(content[4:], uint32(len(end)))
		binary.LittleEndian.PutUint64(content[8:], uint64(now.UnixNano()))
		copy(content[endHeader:], end)
		if sound {
			binary.LittleEndian.PutUint32(content, crc32.Checksum(content[4:endHeader+len(end)], endChecksum))
		}
		if e := (&endFile{page: content}).end(now); !e.Empty && !sound {
			t.Errorf("a file without a checksum has the end %+v", e)
		}
	})
}

func BenchmarkObserve(b *testing.B) {
	for _, kept := range []bool{false, true} {
		b.Run(map[bool]string{false: "memory", true: "file"}[kept], func(b *testing.B) {
			o := &ObservedEnd{}
			if kept {
				o = processWith(b, filepath.Join(b.TempDir(), "log-end"))
			}
			o.Observe(&logv1.Event{Epoch: "e", Revision: 6, FencingToken: "one", NextFencingToken: "two"}, "")
			o.Replace()
			e := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: 7, StorageResource: "pods"}
			b.ReportAllocs()
			for b.Loop() {
				e.Revision++
				o.Observe(e, "/registry/pods/default/a-pod-of-a-deployment-5d4f8c7b9-x2k9q")
			}
		})
	}
}
