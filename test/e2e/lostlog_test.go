package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"watershed.dev/platform/watchcache/core"
	"watershed.dev/test/harness"
)

// A watch continues if NATS loses the event log together with the registry that published it. The other registry has
// read the log, and fills it again.
func TestAWatchOutlivesTheLogAndItsPublisher(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	m := watchMaps(t, s)
	m.add("before")
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
	m.continues()
}

// A watch continues if all registries are killed while the log is lost: each has kept the end that it had read.
func TestAWatchOutlivesTheLogAndAllRegistries(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	m := watchMaps(t, s)
	m.add("before")
	disk := filepath.Join(s.Dir, "nats")
	if err := os.Rename(disk, disk+"-lost"); err != nil {
		t.Fatal(err)
	}
	for _, process := range []string{"nats-0", "registry-0", "registry-1"} {
		kill(t, filepath.Join(s.Dir, process+".pid"))
	}
	m.continues()
}

// continues adds an object, and logs the time until its event.
func (m *watchedMaps) continues() {
	m.t.Helper()
	began := time.Now()
	m.add("after")
	m.t.Logf("the event came after %v", time.Since(began).Round(time.Millisecond))
}

// A watch continues if NATS loses messages that it had acknowledged, as after a power loss. The registries have read
// them, and the publisher fills the log again.
func TestAWatchOutlivesTheEndOfTheLog(t *testing.T) {
	t.Parallel()
	s := harness.Split(t, "")
	etcd, m := etcdClient(t, etcdOf(t, s)), watchMaps(t, s)
	token := func() string {
		resp, err := etcd.Get(t.Context(), "/registry/watershed/logs/default/epoch")
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatal(resp, err)
		}
		var record core.Epoch
		if err := json.Unmarshal(resp.Kvs[0].Value, &record); err != nil {
			t.Fatal(err)
		}
		return record.Token
	}
	m.add("before")
	disk := filepath.Join(s.Dir, "nats")
	harness.Eventually(t, harness.Soon, func() error { // NATS may remove a file meanwhile
		if err := os.RemoveAll(disk + "-older"); err != nil {
			return err
		}
		return os.CopyFS(disk+"-older", os.DirFS(disk))
	})
	for range 2 { // the log may have the next token already
		former := token()
		harness.Eventually(t, harness.Soon, func() error {
			if token() == former {
				return errors.New("the fencing token is the same")
			}
			return nil
		})
	}
	m.add("lost")
	if err := os.Rename(disk, disk+"-newer"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(disk+"-older", disk); err != nil {
		t.Fatal(err)
	}
	kill(t, filepath.Join(s.Dir, "nats-0.pid"))
	m.continues()
}
