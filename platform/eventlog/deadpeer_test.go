package eventlog

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/platform/rpc"
)

// silentServers connects a client to a new server at each call. Each responds to the first ping only.
type silentServers struct {
	connected []time.Time
	// refusals is the number of servers that refuse the client's user, from the second server on.
	refusals int
}

// InProcessConn implements nats.InProcessConnProvider.
func (s *silentServers) InProcessConn() (net.Conn, error) {
	s.connected = append(s.connected, time.Now())
	refuses := len(s.connected) > 1 && len(s.connected) <= 1+s.refusals
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		fmt.Fprintf(server, "INFO {\"version\":%q,\"max_payload\":1024}\r\n", minServerVersion)
		lines := bufio.NewScanner(server)
		for lines.Scan() && !strings.HasPrefix(lines.Text(), "PING") {
		}
		if refuses {
			fmt.Fprint(server, "-ERR 'Authorization Violation'\r\n")
			return
		}
		fmt.Fprint(server, "PONG\r\n")
		_, _ = io.Copy(io.Discard, server)
	}()
	return client, nil
}

// A client leaves a silent server, and repeats a connection that servers refuse. A server refuses a user while its
// accounts are wrong. nats.go shares its timers, so a process can have a single bubble.
func TestAClientReconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers := &silentServers{refusals: 3}
		nc, err := (&Options{Conn: servers}).Connect("registry", rpc.TLS{})
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(servers.connected) < 2 {
			t.Fatal("the client stays")
		}
		if after := servers.connected[1].Sub(servers.connected[0]); after > 5*time.Second {
			t.Errorf("the client leaves after %s", after)
		}
		if nc.IsClosed() {
			t.Errorf("the client stays disconnected: %v", nc.LastError())
		}
	})
}
