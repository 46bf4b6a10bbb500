package storage

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
)

// A client of etcd that upstream opens exists before etcd responds. Upstream's function returns an error after 20 s,
// and the start would end.
func TestUpstreamsClientsDoNotWaitForEtcd(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	config := storagebackend.NewDefaultConfig("/registry", nil)
	config.Transport.ServerList = []string{"http://" + silent.Addr().String()}
	prober, err := factory.CreateProber(*config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_ = prober.Probe(ctx)
	if n := testutil.CollectAndCount(clientMetrics, "grpc_client_started_total"); n == 0 {
		t.Error("upstream's metrics do not count the requests")
	}
	if err := prober.Close(); err != nil {
		t.Error(err)
	}
}
