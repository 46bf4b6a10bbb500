package publisher_test

import (
	"context"
	"encoding/json"
	"os"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/platform/watchcache/logreader"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/publisher"
)

// Every write is in the log once and in etcd's order, also if publishers change and writes happen in between.
func TestEveryWriteIsPublishedOnce(t *testing.T) {
	j := newJournal(t)
	stop := j.publish("one")
	j.expect("reset")
	j.write("create", "a", `"n":"1"`)
	j.write("update", "a", `"n":"2"`)
	want := []string{"reset", "added configmaps/a", "modified configmaps/a was map[n:1]"}
	j.expect(want...)
	stop()
	j.write("delete", "a", "")
	j.write("create", "b", "")
	j.publish("two")
	j.expect(append(want, "deleted configmaps/a", "added configmaps/b")...)
}

// Readers decrypt all events of a transaction. etcd deletes the objects of an expired lease in a single transaction.
func TestEncryptedTransactionIsRead(t *testing.T) {
	j := newEncryptedJournal(t)
	j.write("create", "a", "")
	j.write("create", "b", "")
	below := j.Resources.Storage.Prefix() + "configmaps/x/"
	_, err := j.Resources.Storage.Client.Client.Txn(t.Context()).Then(clientv3.OpDelete(below+"a"),
		clientv3.OpDelete(below+"b")).Commit()
	if err != nil {
		t.Fatal(err)
	}
	j.expect("reset", "added configmaps/a", "added configmaps/b", "deleted configmaps/a", "deleted configmaps/b")
}

// An object of the log has the bytes that a registry reads from etcd: encrypted in etcd, with defaults, and custom. A
// replica compares them.
func TestTheLogHasTheBytesOfASnapshot(t *testing.T) {
	j := newEncryptedJournal(t)
	widgets := &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"}
	j.Resources.Custom.Handler().OnAdd(j.Establish(t, `{"apiVersion": "apiextensions.k8s.io/v1",
"kind": "CustomResourceDefinition", "metadata": {"name": "widgets.example.com"}, "spec": {"group": "example.com",
"names": {"plural": "widgets", "kind": "Widget"}, "scope": "Namespaced", "versions": [{"name": "v1", "served": true,
"storage": true, "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object",
"properties": {"size": {"type": "integer", "default": 3}}}}}}}]}}`), true)
	in := rpc.NewInProcess(false)
	registryv1.RegisterSourceServer(in, j.Source)
	source := logreader.Remote(registryv1.NewSourceClient(in.Client("watchfanout")), eventlog.Main)
	for _, o := range []struct {
		resource *commonv1.Resource
		body     string
	}{
		{fixture.ConfigMaps, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","labels":{"b":"2","a":"1"}},
"data":{"z":"1","y":"<2>"}}`},
		{&commonv1.Resource{Version: "v1", Resource: "services"}, `{"apiVersion":"v1","kind":"Service",
"metadata":{"name":"a"},"spec":{"type":"ExternalName","externalName":"b.example.com"}}`},
		{&commonv1.Resource{Group: "apps", Version: "v1", Resource: "deployments"}, `{"apiVersion":"apps/v1",
"kind":"Deployment","metadata":{"name":"a"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{
"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`},
		{widgets, `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a","labels":{"b":"2","a":"1"}},
"spec":{}}`},
	} {
		if _, err := j.Write(t.Context(), o.resource, &registryv1.WriteRequest{Verb: "create", Body: []byte(o.body)},
			&fixture.Callbacks{}); err != nil {
			t.Fatal(err)
		}
		name := schema.GroupResource{Group: o.resource.Group, Resource: o.resource.Resource}.String()
		item := j.item(name, "a")
		compared := false
		err := source.ObjectKeys(t.Context(), name, item.Revision, []string{"x/a"}, func(row *registryv1.Row) {
			part, ok := item.DifferenceOf(row)
			if compared = ok; part != "" {
				t.Errorf("%s: the log differs from etcd in %s: %s, %s", name, part, item.JSON(), row.Json)
			}
		})
		if err != nil || !compared {
			t.Errorf("%s: the object was not compared: %v", name, err)
		}
	}
}

// A value that cannot be decoded resets only its resource. Later events are published.
func TestUndecodableResetsItsResource(t *testing.T) {
	j := newJournal(t)
	j.publish("one")
	j.expect("reset")
	etcd := j.Resources.Storage.Client.Client
	if _, err := etcd.Put(t.Context(), j.Resources.Storage.Prefix()+"configmaps/x/bad", "k8s\x00rubbish"); err != nil {
		t.Fatal(err)
	}
	j.write("create", "good", "")
	j.expect("reset", "reset configmaps/", "added configmaps/good")
}

// The sums of progress messages are of the keys and revisions in etcd, with the objects that cannot be decoded.
func TestSumsAreOfEtcdsObjects(t *testing.T) {
	j := newJournal(t)
	j.publish("one")
	j.expect("reset")
	etcd := j.Resources.Storage.Client.Client
	for _, name := range []string{"a", "b", "c"} {
		j.write("create", name, "")
	}
	for _, value := range []string{"k8s\x00rubbish", "k8s\x00more rubbish"} {
		if _, err := etcd.Put(t.Context(), j.Resources.Storage.Prefix()+"configmaps/x/bad", value); err != nil {
			t.Fatal(err)
		}
	}
	j.write("update", "a", `"n":"2"`)
	j.write("delete", "b", "")
	var want uint64
	resp, err := etcd.Get(t.Context(), j.Resources.Storage.Prefix()+"configmaps/", clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 3 {
		t.Fatal(len(resp.Kvs), err)
	}
	for _, kv := range resp.Kvs {
		want += core.ObjectHash("x/"+path.Base(string(kv.Key)), kv.ModRevision)
	}
	for deadline := time.After(2 * time.Minute); ; {
		j.mu.Lock()
		got := j.sums["configmaps"]
		j.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-j.changed:
		case <-deadline:
			t.Fatalf("the sum is %x, not %x", got, want)
		}
	}
}

// If etcd has compacted the next revision, the log is reset.
func TestCompactionResetsTheLog(t *testing.T) {
	j := newJournal(t)
	stop := j.publish("one")
	j.expect("reset")
	stop()
	j.write("create", "a", "")
	j.write("update", "a", `"n":"2"`)
	etcd := j.Resources.Storage.Client.Client
	now, err := etcd.Get(t.Context(), "x")
	if err == nil {
		_, err = etcd.Compact(t.Context(), now.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	j.publish("two")
	j.expect("reset", "reset")
	j.write("create", "b", "")
	j.expect("reset", "reset", "added configmaps/b")
}

// An etcd that was restored from a backup is in another epoch, even if its revision is past the log's: the log is
// reset.
func TestNewEpochResetsTheLog(t *testing.T) {
	j := newStoppedJournal(t)
	etcd := j.Resources.Storage.Client.Client
	key := j.publisher("").EpochKey()
	if _, err := etcd.Put(t.Context(), key, `{"id":"another","mark":"another"}`); err != nil {
		t.Fatal(err)
	}
	j.publish("two")
	j.expect("reset", "added configmaps/a", "reset")
	var resp *clientv3.GetResponse
	resp, err := etcd.Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 || strings.Contains(string(resp.Kvs[0].Value), "another") {
		t.Errorf("%v, %v", resp, err)
	}
}

// The first log of a cluster that kube-apiserver served begins with etcd's history, so that watches of clients
// continue.
func TestFirstLogIsBackfilled(t *testing.T) {
	j := newJournal(t)
	j.write("create", "forgotten", "")
	etcd := j.Resources.Storage.Client.Client
	now, err := etcd.Get(t.Context(), "x")
	if err == nil {
		_, err = etcd.Compact(t.Context(), now.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	j.write("create", "a", `"n":"1"`)
	j.write("update", "a", `"n":"2"`)
	j.publish("one")
	j.expect("reset", "added configmaps/a", "modified configmaps/a was map[n:1]")
}

// A lost log is refilled from etcd's history by a registry that has read it. If no running registry has, etcd may have
// been restored too, and the log begins at etcd's revision.
func TestLostLogIsRefilled(t *testing.T) {
	j := newJournal(t)
	stop := j.publish("one")
	j.expect("reset")
	j.write("create", "a", "")
	want := []string{"reset", "added configmaps/a"}
	j.expect(want...)
	j.observed(1, "a")
	lose := func() {
		if err := j.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
			t.Fatal(err)
		}
	}
	lose()
	j.write("create", "b", "")
	want = append(want, "reset", "added configmaps/a", "added configmaps/b")
	j.expect(want...)
	stop()
	lose()
	j.publish("two")
	want = append(want, "reset")
	j.expect(want...)
	j.write("create", "c", "")
	want = append(want, "added configmaps/c")
	j.expect(want...)
	j.observed(1, "c")
	lose() // revisions before this epoch stay out of the log
	j.write("create", "d", "")
	j.expect(append(want, "reset", "added configmaps/c", "added configmaps/d")...)
}

// laggingLeader is the leader of a stream whose other copies have stopped: it counts messages that they do not store,
// and rejects all others. It reports an end before the last message until the stream is deleted.
type laggingLeader struct {
	jetstream.JetStream
	deleted atomic.Bool
}

type laggingStream struct{ jetstream.Stream }

// Stream implements jetstream.JetStream.
func (l *laggingLeader) Stream(ctx context.Context, name string) (jetstream.Stream, error) {
	s, err := l.JetStream.Stream(ctx, name)
	if err != nil || l.deleted.Load() {
		return s, err
	}
	return laggingStream{s}, nil
}

// DeleteStream implements jetstream.JetStream.
func (l *laggingLeader) DeleteStream(ctx context.Context, name string) error {
	l.deleted.Store(true)
	return l.JetStream.DeleteStream(ctx, name)
}

// CachedInfo implements jetstream.Stream.
func (s laggingStream) CachedInfo() *jetstream.StreamInfo {
	info := *s.Stream.CachedInfo()
	info.State.LastSeq--
	return &info
}

func TestALogThatRejectsAllMessagesIsAbandoned(t *testing.T) {
	t.Cleanup(publisher.SetStuckAfter(time.Second))
	j := newStoppedJournal(t)
	p := j.publisher("two")
	leader := &laggingLeader{JetStream: j.js}
	p.JS = leader
	j.write("create", "b", "")
	j.run(p)
	began := time.Now()
	j.expect("reset", "added configmaps/a", "reset", "added configmaps/a", "added configmaps/b")
	if took := time.Since(began); !leader.deleted.Load() || took < time.Second {
		t.Errorf("the stream is deleted: %v, after %s", leader.deleted.Load(), took)
	}
}

// A stream that gets messages is not stuck: another publisher lives.
func TestALogWithAnotherPublisherStays(t *testing.T) {
	t.Cleanup(publisher.SetStuckAfter(time.Second))
	j := newStoppedJournal(t)
	p := j.publisher("two")
	leader := &laggingLeader{JetStream: j.js}
	p.JS = leader
	j.run(p)
	// Three times stuckAfter, at the pace of another publisher: nothing signals that a stream stays.
	for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); time.Sleep(300 * time.Millisecond) {
		if _, err := j.js.Publish(t.Context(), eventlog.Subject("x"), nil); err != nil {
			t.Fatal(err)
		}
	}
	if leader.deleted.Load() {
		t.Error("the stream is deleted")
	}
}

// A lost log is refilled by a publisher that has not read it, if another registry has. The publisher compares etcd with
// the end that the other registry has read.
func TestAnotherRegistryHasReadTheLostLog(t *testing.T) {
	j := newJournal(t)
	stop := j.publish("one")
	// The other registry is no candidate, so that it does not publish next.
	var read eventlog.ObservedEnd
	configMaps, _ := j.Resources.Storage.ByName("configmaps")
	go func() {
		_ = eventlog.Main.Read(t.Context(), j.nats, eventlog.DirectGetReader{JS: j.js}, func(e *logv1.Event) error {
			read.Observe(e, configMaps.Key(e.Namespace, e.Name))
			return nil
		})
	}()
	if _, err := eventlog.Main.ServeObservedEnds(j.nats, read.Ends); err != nil {
		t.Fatal(err)
	}
	j.write("create", "a", "")
	j.expect("reset", "added configmaps/a")
	j.observed(2, "a")
	stop()
	if err := j.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
		t.Fatal(err)
	}
	j.write("create", "b", "")
	j.publish("two")
	j.expect("reset", "added configmaps/a", "reset", "added configmaps/a", "added configmaps/b")
}

// A lost log is refilled if all registries have restarted, because each keeps the end that it has read. It is not if
// etcd was restored meanwhile. A registry that has read nothing since its start is not in etcd's epoch yet.
func TestARestartedRegistryHasKeptTheEnd(t *testing.T) {
	for _, restored := range []bool{false, true} {
		t.Run(map[bool]string{false: "etcd continues", true: "etcd is restored"}[restored], func(t *testing.T) {
			j, dir := newJournal(t), t.TempDir()
			p := j.publisher("one")
			if err := p.KeepEnd(dir); err != nil {
				t.Fatal(err)
			}
			stop := j.run(p)
			j.write("create", "a", "")
			j.expect("reset", "added configmaps/a")
			j.observed(1, "a")
			p.ReplaceEnd()
			stop()
			if err := j.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
				t.Fatal(err)
			}
			copied := t.TempDir() // this process keeps the lock of the file
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			if restored {
				etcd := j.Resources.Storage.Client.Client
				record, err := etcd.Get(t.Context(), p.EpochKey())
				if err != nil {
					t.Fatal(err)
				}
				var epoch core.Epoch
				if err := json.Unmarshal(record.Kvs[0].Value, &epoch); err != nil {
					t.Fatal(err)
				}
				epoch.Token = "of the backup"
				value, _ := json.Marshal(epoch)
				if _, err := etcd.Put(t.Context(), p.EpochKey(), string(value)); err != nil {
					t.Fatal(err)
				}
			}
			next := j.publisher("two")
			if err := next.KeepEnd(copied); err != nil {
				t.Fatal(err)
			}
			if epoch, err := next.InEpoch(t.Context(), 0); err == nil {
				t.Errorf("a registry that has read nothing is in the epoch %q", epoch)
			}
			j.run(next)
			refilled := []string{"reset", "added configmaps/a", "reset"}
			if !restored {
				refilled = append(refilled, "added configmaps/a")
			}
			j.expect(refilled...)
			j.write("create", "b", "")
			j.expect(append(refilled, "added configmaps/b")...)
		})
	}
}

// A registry is in etcd's epoch when it has read the log up to etcd's fencing token. The log of another etcd is in
// another epoch, although etcd is past its end.
func TestInEpoch(t *testing.T) {
	j := newStoppedJournal(t)
	p := j.publisher("two")
	end, err := j.log.End(t.Context(), j.js, func(*logv1.Event) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	read := end.Progress.Revision
	check := func(when string, want bool) {
		t.Helper()
		if epoch, err := p.InEpoch(t.Context(), read); (err == nil) != want || want && epoch != end.Progress.Epoch {
			t.Errorf("%s: %q, %v", when, epoch, err)
		}
	}
	check("before the log is read", false)
	old := proto.CloneOf(end.Progress)
	old.FencingToken, old.NextFencingToken = "of an earlier message", ""
	p.Observe(old)
	check("before the log is read to its end", false)
	p.Observe(end.Progress)
	check("at the end of the log", true)
	read++ // etcd may be a backup, whose token earlier messages of the log have
	check("before another message", false)
	read--
	if _, err := j.Resources.Storage.Client.Client.Put(t.Context(), p.EpochKey(), `{"id":"another"}`); err != nil {
		t.Fatal(err)
	}
	check("with another etcd", false)
	if _, err := j.Resources.Storage.Client.Client.Delete(t.Context(), p.EpochKey()); err != nil {
		t.Fatal(err)
	}
	check("with an empty etcd", false)
}

// A log moves to another storage when its flag changes. JetStream refuses to change a stream's storage.
func TestALogMovesToAnotherStorage(t *testing.T) {
	j := newStoppedJournal(t)
	p := j.publisher("two")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_ = eventlog.Main.Read(ctx, j.nats, eventlog.DirectGetReader{JS: j.js}, func(e *logv1.Event) error {
		if p.Observe(e); core.IsChange(e) { // the log's last
			cancel()
		}
		return nil
	})
	j.log.Storage = "file"
	j.run(p)
	j.write("create", "b", "")
	j.expect("reset", "added configmaps/a", "reset", "added configmaps/a", "added configmaps/b")
	stream, err := j.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil || stream.CachedInfo().Config.Storage != jetstream.FileStorage {
		t.Errorf("%+v, %v", stream, err)
	}
}

// The publisher exports the number of missing replicas, and a registry that does not publish exports none.
func TestMissingReplicasAreExported(t *testing.T) {
	j := newStoppedJournal(t)
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(publisher.Metrics()...)
	exports := func(want ...float64) {
		t.Helper()
		var got []float64
		for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			families, err := metrics.Gather()
			if err != nil {
				t.Fatal(err)
			}
			got = nil
			for _, f := range families {
				if f.GetName() == "watershed_publisher_missing_log_replicas" {
					for _, m := range f.Metric {
						got = append(got, m.Gauge.GetValue())
					}
				}
			}
			if slices.Equal(got, want) {
				return
			}
		}
		t.Fatalf("missing replicas %v are exported, want %v", got, want)
	}
	exports()
	stop := j.publish("two")
	exports(0)
	stop()
	exports()
	j.log.Replicas = 3 // the single server refuses more replicas
	stop = j.publish("three")
	exports(2)
	stop()
	exports()
}
