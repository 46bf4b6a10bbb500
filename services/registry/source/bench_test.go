package source_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/logreader"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// BenchmarkComparison measures a replica's comparison of a resource with etcd. user-ns/object is the CPU time of the
// replica, registry and etcd in user mode, which share the process.
func BenchmarkComparison(b *testing.B) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	fx := fixture.New(b)
	const objects = 5000
	for n := range objects {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":%q}}`, n,
			strings.Repeat("x", 1000))
		if _, err := fx.Write(b.Context(), fixture.ConfigMaps, &registryv1.WriteRequest{Verb: "create",
			Body: []byte(body)}, &fixture.Callbacks{}); err != nil {
			b.Fatal(err)
		}
	}
	in := rpc.NewInProcess(false)
	registryv1.RegisterSourceServer(in, fx.Source)
	c := cache.New(64<<20, 0)
	l := logreader.New(c, nil, logreader.Remote(registryv1.NewSourceClient(in.Client("watchfanout")), eventlog.Main),
		&lifecycle.Readiness{}, logreader.Config{})
	revision, err := fx.Resources.Storage.ReadRevision(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	c.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision})
	if _, err := l.Snapshot(context.Background(), c.Resource("configmaps"), ""); err != nil {
		b.Fatal(err)
	}
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	for b.Loop() {
		if got := l.CompareWithEtcd(b.Context()); got.Objects != objects || got.Values != 20 ||
			len(got.Differences)+len(got.Errors) > 0 {
			b.Fatalf("%+v", got)
		}
	}
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	user := float64(after.Utime.Nano()-before.Utime.Nano()) / float64(b.N)
	b.ReportMetric(user/objects, "user-ns/object")
}
