package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// A watch continues if NATS loses the event log together with the registry that published it. The other registry has
// read the log, and fills it again.
func TestAWatchOutlivesTheLogAndItsPublisher(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	m := watchMaps(t, s)
	if err := m.create("before"); err != nil {
		t.Fatal(err)
	}
	m.receive(watch.Added, "before")
	publisher := "registry-0"
	if s.Metric(publisher, "watershed_publisher_leading") == 0 {
		publisher = "registry-1"
	}
	disk := filepath.Join(s.Dir, "nats")
	if err := os.Rename(disk, disk+"-lost"); err != nil { // the next process of NATS finds no log
		t.Fatal(err)
	}
	kill(t, filepath.Join(s.Dir, "nats-0.pid"))
	kill(t, filepath.Join(s.Dir, publisher+".pid"))
	m.within = time.Minute
	began := time.Now()
	if err := m.create("after"); err != nil {
		t.Fatal(err)
	}
	m.receive(watch.Added, "after")
	t.Logf("the event came after %v", time.Since(began).Round(time.Millisecond))
}
