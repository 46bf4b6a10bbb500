package eventlog

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// keptEnd returns the path of a file with the end of a log, and the end.
func keptEnd(t testing.TB) (path string, end core.LogEnd) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "new", "log-end")
	var o ObservedEnd
	if err := o.Keep(path); err != nil {
		t.Fatal(err)
	}
	o.Observe(&logv1.Event{Epoch: "e", Revision: 6, FencingToken: "one", NextFencingToken: "two"}, "")
	o.Observe(&logv1.Event{Type: logv1.Type_TYPE_DELETED, Epoch: "e", Revision: 7, StorageResource: "pods"}, "/pods/a")
	return path, o.Kept()
}

// A process continues from the end that an earlier process has kept. It has read nothing itself.
func TestAnEndOutlivesItsProcess(t *testing.T) {
	path, end := keptEnd(t)
	var next ObservedEnd
	if err := next.Keep(path); err != nil {
		t.Fatal(err)
	}
	kept := next.Kept()
	if kept.Empty || kept.Last.Revision != 7 || !kept.HasToken("one") || !kept.HasToken("two") || kept.Event != end.Event ||
		kept.Progress.Epoch != "e" {
		t.Errorf("kept %+v, of %+v", kept, end)
	}
	if own := next.End(); !own.Empty {
		t.Errorf("it has read %+v", own)
	}
	// A refilled log begins with earlier events.
	next.Observe(&logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: 3, StorageResource: "pods"}, "/pods/b")
	if kept := next.Kept(); kept.Last.Revision != 7 || kept.Event != end.Event {
		t.Errorf("after an earlier event: %+v", kept)
	}
	if own := next.End(); own.Last.Revision != 3 {
		t.Errorf("after an earlier event, it has read %+v", own)
	}
	next.Observe(&logv1.Event{Epoch: "another", Revision: 4, FencingToken: "three"}, "")
	var last ObservedEnd
	if err := last.Keep(path); err != nil {
		t.Fatal(err)
	}
	if kept := last.Kept(); kept.Last.Revision != 4 || kept.HasToken("one") || !kept.HasToken("three") {
		t.Errorf("in another epoch: %+v", kept)
	}
}

// A file with a changed or missing byte, and a file of another time, have no end.
func TestADamagedEndIsNone(t *testing.T) {
	path, _ := keptEnd(t)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	if endOf(content, now).Empty {
		t.Fatal("the file has no end")
	}
	for when, later := range map[string]time.Duration{"an old": maxEndAge + time.Second, "a future": -time.Hour} {
		if end := endOf(content, now.Add(later)); !end.Empty {
			t.Errorf("%s file has the end %+v", when, end)
		}
	}
	size := endHeader + int(binary.LittleEndian.Uint32(content[4:]))
	for i := range size {
		damaged := bytes.Clone(content)
		damaged[i]++
		if end := endOf(damaged, now); !end.Empty {
			t.Fatalf("with byte %d changed, the file has the end %+v", i, end)
		}
		if err := os.WriteFile(path, content[:i], 0o600); err != nil {
			t.Fatal(err)
		}
		_, end, err := openEndFile(path)
		if err != nil || !end.Empty {
			t.Fatalf("with %d bytes, the file has the end %+v, %v", i, end, err)
		}
	}
}

// A key that does not fit leaves no end: without its last event, the end would prove less.
func TestAnEndThatDoesNotFitIsNone(t *testing.T) {
	path, _ := keptEnd(t)
	var o ObservedEnd
	if err := o.Keep(path); err != nil {
		t.Fatal(err)
	}
	change := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: 8, StorageResource: "pods"}
	o.Observe(change, strings.Repeat("x", endFileSize))
	if kept := o.Kept(); kept.Last.Revision != 8 {
		t.Errorf("the process forgets its end: %+v", kept)
	}
	if _, end, err := openEndFile(path); err != nil || !end.Empty {
		t.Errorf("the file has %+v, %v", end, err)
	}
}

// The content of a file is an end or none.
func FuzzEnd(f *testing.F) {
	path, _ := keptEnd(f)
	content, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
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
		if e := endOf(content, now); !e.Empty {
			_ = core.ObservedEndAt(e)
			if !sound {
				t.Errorf("a file without a checksum has the end %+v", e)
			}
		}
	})
}

func BenchmarkObserve(b *testing.B) {
	for _, kept := range []bool{false, true} {
		b.Run(map[bool]string{false: "memory", true: "file"}[kept], func(b *testing.B) {
			var o ObservedEnd
			if kept {
				if err := o.Keep(filepath.Join(b.TempDir(), "log-end")); err != nil {
					b.Fatal(err)
				}
			}
			o.Observe(&logv1.Event{Epoch: "e", Revision: 6, FencingToken: "one", NextFencingToken: "two"}, "")
			e := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Epoch: "e", Revision: 7, StorageResource: "pods"}
			b.ReportAllocs()
			for b.Loop() {
				e.Revision++
				o.Observe(e, "/registry/pods/default/a-pod-of-a-deployment-5d4f8c7b9-x2k9q")
			}
		})
	}
}
