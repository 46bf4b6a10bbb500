package eventlog

import (
	"net"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"watershed.dev/platform/usertimeout"
)

func TestADialHasAUserTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var o nats.Options
	for _, set := range leaveDeadPeers() {
		if err := set(&o); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := o.Dialer.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := usertimeout.Of(conn.(syscall.Conn)); err != nil || got != unacknowledgedTimeout {
		t.Errorf("TCP_USER_TIMEOUT is %s: %v", got, err)
	}
}
