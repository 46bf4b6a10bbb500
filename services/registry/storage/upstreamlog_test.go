package storage

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"watershed.dev/platform/telemetry"
)

// The lines of an etcd client that upstream opens are lines of the process's log, and not of standard error.
func TestUpstreamsClientsLogToTheProcess(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	var out bytes.Buffer
	if err := (&telemetry.Options{Verbosity: 4}).StartLogs("registry", &out); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer() // without etcd's methods
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	config := storagebackend.NewDefaultConfig("/registry", nil)
	config.Transport.ServerList = []string{"http://" + l.Addr().String()}
	prober, err := factory.CreateProber(*config)
	if err != nil {
		t.Fatal(err)
	}
	if err := prober.Probe(t.Context()); err == nil {
		t.Error("etcd responds")
	}
	if err := prober.Close(); err != nil {
		t.Error(err)
	}
	slog.SetDefault(before) // no line comes after it
	if text := out.String(); !strings.Contains(text, `msg="retrying of unary invoker failed"`) {
		t.Errorf("%s", text)
	}
}
