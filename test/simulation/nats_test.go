package simulation

import (
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
)

// natsServer is a NATS server that can be restarted, and a connection to it.
type natsServer struct {
	t      *testing.T
	dir    string
	mu     sync.Mutex
	server *server.Server
	log    eventlog.Options
	nc     *nats.Conn
	js     jetstream.JetStream
}

// newNATS runs a server. The caller must call end.
func newNATS(t *testing.T) *natsServer {
	t.Helper()
	dir, err := os.MkdirTemp(t.TempDir(), "nats")
	if err != nil {
		t.Fatal(err)
	}
	s := &natsServer{t: t, dir: dir}
	s.run()
	s.log = eventlog.Options{Storage: "memory", Replicas: 1, Retention: time.Hour, MaxBytes: 1 << 26, Conn: s}
	if s.nc, err = s.log.Connect("registry", rpc.TLS{}); err == nil {
		s.js, err = jetstream.New(s.nc)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// InProcessConn implements nats.InProcessConnProvider with the current server.
func (s *natsServer) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		return nil, errors.New("no server")
	}
	return s.server.InProcessConn()
}

func (s *natsServer) run() {
	started, err := server.NewServer(&server.Options{JetStream: true, StoreDir: s.dir, DontListen: true, NoLog: true,
		NoSigs: true})
	if err != nil {
		s.t.Fatal(err)
	}
	started.Start()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = started
}

func (s *natsServer) stop() {
	s.mu.Lock()
	running := s.server
	s.server = nil
	s.mu.Unlock()
	running.Shutdown()
	running.WaitForShutdown()
}

func (s *natsServer) end() {
	s.nc.Close()
	s.stop()
}
