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
type silentServers struct{ connected []time.Time }

// InProcessConn implements nats.InProcessConnProvider.
func (s *silentServers) InProcessConn() (net.Conn, error) {
	s.connected = append(s.connected, time.Now())
	client, server := net.Pipe()
	go func() {
		fmt.Fprintf(server, "INFO {\"version\":%q,\"max_payload\":1024}\r\n", minServerVersion)
		lines := bufio.NewScanner(server)
		for lines.Scan() && !strings.HasPrefix(lines.Text(), "PING") {
		}
		fmt.Fprint(server, "PONG\r\n")
		_, _ = io.Copy(io.Discard, server)
	}()
	return client, nil
}

func TestAClientLeavesASilentServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers := &silentServers{}
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
	})
}
