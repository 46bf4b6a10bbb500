package publisher

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/core"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// BenchmarkTransaction measures the messages of a transaction of a single event, without decoding and without NATS.
func BenchmarkTransaction(b *testing.B) {
	var p core.Publisher
	t := p.Begin("t-", core.Epoch{}, eventlog.Encode(1<<20))
	t.LogRead(core.LogEnd{Last: core.IDOf(&logv1.Event{Revision: 1}, "t")})
	t.EtcdRead(core.EtcdState{Epoch: core.Epoch{ID: "e"}, Revision: 1})
	t.Answer(2)
	t.Progress(2) // the first entry with sums
	t.TakeEntries()
	object := &logv1.Object{Json: make([]byte, 500), Protobuf: make([]byte, 300)}
	revision := int64(2)
	b.ReportAllocs()
	for b.Loop() {
		revision++
		e := &logv1.Event{
			Type:            logv1.Type_TYPE_MODIFIED,
			Revision:        revision,
			StorageResource: "pods",
			Object:          object,
		}
		t.Transaction([]core.Change{{EtcdEvent: core.EtcdEvent{Key: "pods/a", Revision: revision}, Event: e}})
		if len(t.TakeEntries()) != 1 {
			b.Fatal("the event has no message")
		}
	}
}

// BenchmarkEventPath measures an event of a pod from etcd's response to a replica's cache: decoded, encoded,
// appended to NATS in this process, read and applied. The publisher sends sums after each 1,000 events, as with 500
// events a second. user-ns/op is the CPU time of the whole process in user mode, without etcd's writes.
//
// docs/design/0034 states how the cost of the sums is measured with it.
func BenchmarkEventPath(b *testing.B) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	nats, err := server.NewServer(&server.Options{JetStream: true, StoreDir: b.TempDir(), DontListen: true,
		NoSigs: true})
	if err != nil {
		b.Fatal(err)
	}
	nats.Start()
	defer nats.WaitForShutdown()
	defer nats.Shutdown()
	fx := fixture.New(b)
	p := &Publisher{Storage: fx.Resources.Storage, Etcd: fx.Resources.Storage.Etcd, Identity: "p",
		Log: &eventlog.Options{Conn: nats, Storage: "memory", Replicas: 1, Retention: time.Minute, MaxBytes: 1 << 26}}
	if p.NATS, err = p.Log.Connect("registry", rpc.TLS{}); err != nil {
		b.Fatal(err)
	}
	defer p.NATS.Close()
	if p.JS, err = jetstream.New(p.NATS); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	if _, err := p.Log.Stream(ctx, p.JS); err != nil {
		b.Fatal(err)
	}
	pod := &commonv1.Resource{Version: "v1", Resource: "pods"}
	for n := range 100 {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p%d","annotations":{"a":%q}},
"spec":{"containers":[{"name":"c","image":"i","env":[{"name":"E","value":"v"}]}]}}`, n, strings.Repeat("x", 1000))
		if _, err := fx.Write(ctx, pod, &registryv1.WriteRequest{Verb: "create", Body: []byte(body)},
			&fixture.Callbacks{}); err != nil {
			b.Fatal(err)
		}
	}
	stored, err := p.Etcd.Client.Client.Get(ctx, "/registry/pods/", clientv3.WithPrefix())
	if err != nil {
		b.Fatal(err)
	}
	log, err := p.Log.ID.NewWriter(ctx, p.JS)
	if err != nil {
		b.Fatal(err)
	}
	t := &term{Term: p.core.Begin("t-", core.Epoch{ID: "e", Token: "t"}, p.encode), Publisher: p, log: log}
	if _, err := p.Etcd.Client.Client.Put(ctx, p.electionKey(), p.Identity); err != nil {
		b.Fatal(err)
	}
	if err := t.proceed(ctx); err != nil {
		b.Fatal(err)
	}
	replica := cache.New(64<<20, 0)
	go func() {
		_ = eventlog.Main.Read(ctx, p.NATS, eventlog.DirectGetReader{JS: p.JS}, func(e *logv1.Event) error {
			replica.Apply(e)
			return nil
		})
	}()
	wait := func(ctx context.Context, revision int64) error {
		return replica.Wait(ctx, revision, func(ctx context.Context, advanced <-chan struct{}) { <-advanced })
	}
	first := t.Request.Revision
	if err := wait(ctx, first-1); err != nil {
		b.Fatal(err)
	}
	none := func(context.Context, string, func(*registryv1.Row)) (int64, error) { return first - 1, nil }
	if _, err := replica.Resource("pods").Snapshot(ctx, "", none, wait); err != nil {
		b.Fatal(err)
	}
	resets := replica.Resets()
	pods, revision := int64(len(stored.Kvs)), first
	event := func() *mvccpb.Event {
		of := stored.Kvs[(revision-first)%pods]
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: of.Key, Value: of.Value,
			CreateRevision: first + (revision-first)%pods, ModRevision: revision}}
		if previous := revision - pods; previous >= first {
			e.PrevKv = &mvccpb.KeyValue{Key: of.Key, Value: of.Value, CreateRevision: e.Kv.CreateRevision,
				ModRevision: previous}
		}
		return e
	}
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	for b.Loop() {
		if err := t.handle(ctx, etcdResponse{events: []*mvccpb.Event{event()}, revision: revision}, true); err != nil {
			b.Fatal(err)
		}
		if revision++; revision%1000 == 0 {
			t.PublishSums()
		}
		select {
		case ack := <-t.log.Acks():
			err = t.acknowledge(ack)
		case <-t.log.Due():
			err = t.log.Flush(ctx)
		default:
		}
		if err == nil {
			err = t.proceed(ctx)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	t.PublishSums()
	if err := t.proceed(ctx); err != nil {
		b.Fatal(err)
	}
	if err := t.log.Flush(ctx); err != nil {
		b.Fatal(err)
	}
	if err := wait(ctx, revision-1); err != nil {
		b.Fatal(err)
	}
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	b.ReportMetric(float64(after.Utime.Nano()-before.Utime.Nano())/float64(b.N), "user-ns/op")
	if len(replica.Differences()) > 0 || replica.Resets() != resets {
		b.Error("the replica differs from the publisher's sums")
	}
}
