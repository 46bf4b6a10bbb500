package embedded

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	processv1 "watershed.dev/proto/watershed/process/v1"
)

// flagsOf returns flags with values.
func flagsOf(t *testing.T, add func(*pflag.FlagSet), args ...string) *pflag.FlagSet {
	t.Helper()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	add(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return fs
}

// checkReport checks the report of a program, whose disk is of its directory.
func checkReport(t *testing.T, data []byte, name, address, dir string) {
	t.Helper()
	var r process.Report
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	if r.Services[0] != name || r.Address != address || r.MemoryBytes == 0 || r.Version == "" || len(r.NotReady) > 0 ||
		r.Started.IsZero() || len(r.Disks) != 1 || r.Disks[0].Path != dir || r.Flags["data-dir"] != dir ||
		len(r.Certificates) == 0 {
		t.Errorf("%s", data)
	}
}

// Registry reads the report of an etcd member's process on a connection of an etcd client.
func TestTheReportOfAMember(t *testing.T) {
	ids := inner(t)
	dir, address := t.TempDir(), "https://"+freeAddress(t)
	e := &Etcd{ID: ids("etcd")}
	fs := flagsOf(t, e.AddFlags, "--data-dir", dir, "--listen-client-urls", address)
	e.program = &process.Program{Name: "etcd", Address: address, ID: &e.ID, Flags: fs,
		NotReady: func() error { return nil }}
	runEtcd(t, e)
	conn, err := registryClient(t, ids("registry"), address).Dial(address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	resp, err := processv1.NewProcessesClient(conn).Report(t.Context(), &processv1.ReportRequest{})
	if err != nil {
		t.Fatal(err)
	}
	checkReport(t, resp.Report, "etcd", address, dir)
}

// Registry reads the report of a NATS server's process by a request to all servers. watchfanout may not send it, and a
// client with the server's certificate may only respond to it.
func TestTheReportOfANATSServer(t *testing.T) {
	ids := inner(t)
	dir, address := t.TempDir(), freeAddress(t)
	n := &NATS{ID: ids("nats")}
	fs := flagsOf(t, n.AddFlags, "--data-dir", dir, "--listen-address", address, "--jetstream-key-file", secretKey(t))
	n.program = &process.Program{Name: "nats", Address: address, ID: &n.ID, Flags: fs, NotReady: n.notReady}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	server := n.Runner()
	go func() { ended <- lifecycle.Run(ctx, []lifecycle.Runner{server}, lifecycle.Observer{}) }()
	defer func() { cancel(); <-ended }()
	waited, done := context.WithTimeout(t.Context(), 2*time.Minute)
	defer done()
	if err := server.Ready.Wait(waited); err != nil {
		t.Fatal(err)
	}
	log := &eventlog.Options{URL: "tls://" + address}
	reports := func(nc *nats.Conn) (all [][]byte) {
		if err := eventlog.Reports(t.Context(), nc, func(report []byte) { all = append(all, report) }); err != nil {
			t.Fatal(err)
		}
		return all
	}
	registry, _ := connectTo(t, log, "registry", ids("registry"))
	var all [][]byte
	eventually(t, func() error {
		if all = reports(registry); len(all) != 1 {
			return errors.New("no response")
		}
		return nil
	})
	checkReport(t, all[0], "nats", address, dir)
	second, _ := connectTo(t, log, "nats", ids("nats")) // the cluster may have more servers than the log has replicas
	err := eventlog.ServeReport(second, func() ([]byte, error) { return []byte("{}"), nil })
	if err == nil {
		err = second.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	if all = reports(registry); len(all) != 2 {
		t.Errorf("%d servers have reports, want 2", len(all))
	}
	for _, name := range []string{"watchfanout", "nats"} {
		if nc, _ := connectTo(t, log, name, ids(name)); len(reports(nc)) > 0 {
			t.Errorf("%s may request reports", name)
		}
	}
	for _, subject := range []string{"watershed.event.>", "watershed.end.request", "_INBOX_registry.>", ">"} {
		own, _ := connectTo(t, log, "nats", ids("nats"))
		_, err := own.SubscribeSync(subject)
		if err == nil {
			err = own.Flush()
		}
		if err == nil && own.LastError() == nil {
			t.Errorf("a client with the certificate of NATS may subscribe to %s", subject)
		}
	}
}
